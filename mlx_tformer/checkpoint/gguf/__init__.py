"""GGUF files, read by bounds-checked code of our own: `container` the file, `blocks` the numbers, `architectures`,
`config` and `rope` the metadata, `tokenizer` the vocabulary; `file` puts them together, and `source` shows the result
as a checkpoint."""
