"""ViT: an encoder of images, pre-norm; patches are its tokens, behind a learned one that classifies the whole."""

from math import prod

from ..config import Config
from ..names import Drop, Flattened, Moved, Names, Unused, either, joined
from ..nn import Attention, Block, Everything, LayerNorm, Linear, Mlp, Patches, Residual, Stack, VisionEncoder

ABSENT = {"image_size": 224, "patch_size": 16, "num_channels": 3}
WIDEST = 2**24
"""Values of a patch at most, so that MLX can count those of the matrix."""
CLASSIFIES = ("classifier.weight", "head.weight")


def model(c: Config) -> VisionEncoder:
    dim, heads, eps = c["hidden_size"], c["num_attention_heads"], c.get("layer_norm_eps", 1e-12)
    head_dim, hidden, act = (
        c.head_dim("hidden_size", "num_attention_heads"),
        c["intermediate_size"],
        c.get("hidden_act", "gelu"),
    )
    bias, channels, (size, patch) = c.get("qkv_bias", True), c["num_channels"], sizes_of(c)
    if channels * prod(patch) > WIDEST:
        raise c.wrong("num_channels", f"patches of at most {WIDEST} values")
    c.ignore("hidden_dropout_prob", "encoder_stride", "pooler_output_size", "pooler_act")  # of heads for other tasks

    def block() -> Block:
        attn = Attention(dim, heads, head_dim=head_dim, bias=bias, out_bias=True, mask=Everything())
        mlp = Mlp(dim, hidden, act)
        return Block(attn=Residual(attn, pre=LayerNorm(dim, eps)), mlp=Residual(mlp, pre=LayerNorm(dim, eps)))

    stack = Stack([block() for _ in range(c["num_hidden_layers"])], LayerNorm(dim, eps))
    head = Linear(dim, len(c.labels)) if c.stores(*CLASSIFIES, tasks=("ForImageClassification",)) else None
    return VisionEncoder(Patches(size, patch, channels=channels, dim=dim), stack, head)


def sizes_of(c: Config) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of an image and of a patch; one number stands for both."""
    pairs = [v if isinstance(v, list) else [v, v] for v in (c["image_size"], c["patch_size"])]
    (height, width), (high, wide) = pairs
    if high > height or wide > width:
        raise c.wrong("patch_size", f"no more than image_size, {c['image_size']}")
    return (height, width), (high, wide)


def names(c: Config) -> Names:
    (height, width), (high, wide) = sizes_of(c)
    count, patch = 1 + (height // high) * (width // wide), (c["num_channels"], high, wide)
    theirs, ours = "encoder.layer.{}", "encoder.layers.{}"
    attn, projection = f"{theirs}.attention", "embeddings.patch_embeddings.projection"
    return either(
        "vit.",
        {
            "embeddings.cls_token": Moved("embed.first", (Flattened(0, (1, 1)),)),
            "embeddings.position_embeddings": Moved("embed.positions.table.weight", (Flattened(0, (1, count)),)),
            "embeddings.mask_token": Drop("what hides patches in training"),
            f"{projection}.weight": Moved("embed.project.weight", (Flattened(1, patch),)),
            f"{projection}.bias": "embed.project.bias",
            f"{theirs}.layernorm_before": f"{ours}.attn.pre",
            **joined(f"{ours}.attn.op.qkv", {f"{attn}.attention.{part}": 1 for part in ("query", "key", "value")}),
            f"{attn}.output.dense": f"{ours}.attn.op.out",
            f"{theirs}.layernorm_after": f"{ours}.mlp.pre",
            f"{theirs}.intermediate.dense": f"{ours}.mlp.op.up",
            f"{theirs}.output.dense": f"{ours}.mlp.op.down",
            "layernorm": "encoder.norm",
            "pooler.dense": Unused("the pooler, which no head for labels reads"),
        },
    ) | {"classifier": "head"}
