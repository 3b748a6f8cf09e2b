"""Operations of networks, with MLX, or with numpy and OpenBLAS if MLX is slow."""
