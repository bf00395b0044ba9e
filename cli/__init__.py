"""The terminal program `mlx-tformer`: it parses, calls the library and prints; installed as `mlx_tformer_cli`."""
