"""A .gguf file as a source: what `gguf` reads out of it, under the names that a Hugging Face folder would have."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from ..source import Source
from .file import GgufFile


@dataclass
class GgufSource(Source):
    """One .gguf file."""

    file: GgufFile = field(kw_only=True)

    @classmethod
    def open(cls, path: Path, *, origin: str, revision: str | None = None) -> "GgufSource":
        """Check the file and translate its metadata; raises BadInput for what is broken or not understood."""
        file = GgufFile(path)
        return cls(
            origin=origin,
            config=file.config,
            tensors=file.tensors,
            quantization=file.quantization,
            generation_config=file.generation_config,
            revision=revision,
            config_file=str(path),
            file=file,
        )

    def read(self, name: str) -> mx.array:
        return self.file.read(name)

    def blocks(self, name: str, rows: int) -> Iterator[mx.array]:
        return self.file.blocks(name, rows)

    def companions(self) -> dict[str, bytes]:
        files = {name: text.encode() for name, text in self.file.tokenizer_files().items()}
        if self.generation_config:
            files["generation_config.json"] = (json.dumps(self.generation_config, indent=2) + "\n").encode()
        return files
