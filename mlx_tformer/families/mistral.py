"""Mistral 7B and its relatives: Llama with a sliding window in every layer, where the config has one."""

from ..config import Config
from ..nn import LM, Causal, Window
from . import llama

ABSENT = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}


def model(c: Config) -> LM:
    window = c.get("sliding_window")
    mask = Causal() if window is None else Causal() & Window(window)
    return llama.decoder(c, lambda layer: llama.attention(c, bias=False, out_bias=False, mask=mask))


names = llama.names
