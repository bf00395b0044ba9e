"""`python -m mlx_tformer_cli` is `mlx-tformer`."""

from .main import main

main()
