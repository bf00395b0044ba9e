"""Peak memory and seconds of converting a synthetic checkpoint of about 2 GB: Llama's shapes, bfloat16, four shards.

    python tests/bench/convert_memory.py [--vocab 32000] [--layers 20] [--folder TMP] [--source MODEL]

Each conversion runs in a process of its own; "import" is one that does nothing else, and "file copy" copies the same
files, for the time that the disk takes. Wanted: a peak below 700 MB, whatever the size of the model and of its largest
tensor (`--vocab 262144 --layers 4` makes a large one). Needs twice the checkpoint's size on the disk.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measuring import measured, print_table

DIM, HEADS, KV_HEADS, MLP = 2048, 32, 4, 5632
SHARDS = 4
RESOURCES = """
import json, resource, sys, time
import mlx_tformer
start, result = time.perf_counter(), {}
if len(sys.argv) > 1:
    bits = int(sys.argv[3]) or None
    made = mlx_tformer.convert(sys.argv[1], sys.argv[2], quantize=bits)
    result["bits"] = made.bits_per_weight
unit = 1 if sys.platform == "darwin" else 1024
result["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
result["seconds"] = time.perf_counter() - start
print(json.dumps(result))
"""


def shapes(vocab: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Llama, in the order of its file."""
    kv = DIM // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (vocab, DIM)
    for i in range(layers):
        at = f"model.layers.{i}"
        yield f"{at}.input_layernorm.weight", (DIM,)
        for name, rows in {"q_proj": DIM, "k_proj": kv, "v_proj": kv, "o_proj": DIM}.items():
            yield f"{at}.self_attn.{name}.weight", (rows, DIM)
        yield f"{at}.post_attention_layernorm.weight", (DIM,)
        for name, shape in {"gate_proj": (MLP, DIM), "up_proj": (MLP, DIM), "down_proj": (DIM, MLP)}.items():
            yield f"{at}.mlp.{name}.weight", shape
    yield "model.norm.weight", (DIM,)
    yield "lm_head.weight", (vocab, DIM)


def write(folder: Path, vocab: int, layers: int) -> int:
    """Write the checkpoint; returns the bytes of its weights."""
    tensors = dict(shapes(vocab, layers))
    total = sum(2 * math.prod(shape) for shape in tensors.values())
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    written = 0
    for name, shape in tensors.items():
        if written > total / SHARDS * len(shards):
            shards.append({})
        shards[-1][name] = shape
        written += 2 * math.prod(shape)
    names = {f"model-{i:05}-of-{len(shards):05}.safetensors": part for i, part in enumerate(shards, 1)}
    for file, part in names.items():
        write_shard(folder / file, part)
    weight_map = {name: file for file, part in names.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": "llama", "hidden_size": DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config |= {"intermediate_size": MLP, "num_hidden_layers": layers, "vocab_size": vocab}
    config |= {"max_position_embeddings": 2048, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return total


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """One safetensors file of noise."""
    noise = (np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    header, offset = {}, 0
    for name, shape in tensors.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while offset > 0:
            offset -= file.write(noise.tobytes()[:offset])


def copy(source: Path, dest: Path) -> float:
    """Seconds that copying the files takes."""
    start = time.perf_counter()
    shutil.copytree(source, dest)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where the files go (a temporary folder)")
    parser.add_argument("--source", help="convert this model instead of a synthetic one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        work = Path(name)
        source, dest = given.source, work / "made"
        rows: list[tuple[object, ...]] = [("import", measured(RESOURCES)["peak"] / 1e6, "", "")]
        if source is None:
            source = work / "source"
            source.mkdir()
            print(f"{write(source, given.vocab, given.layers) / 1e9:.2f} GB of weights")
            rows.append(("file copy", "", copy(source, dest), ""))
            shutil.rmtree(dest)
        for title, bits in {"convert": 0, "convert --quantize 4": 4}.items():
            found = measured(RESOURCES, source, dest, bits)
            rows.append((title, found["peak"] / 1e6, found["seconds"], found["bits"]))
            shutil.rmtree(dest)
        print_table(["", "peak MB", "seconds", "bits a weight"], rows)


if __name__ == "__main__":
    main()
