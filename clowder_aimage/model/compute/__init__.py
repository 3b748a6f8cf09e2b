"""Operations of networks, with MLX, or with numpy and OpenBLAS where MLX is slow."""
