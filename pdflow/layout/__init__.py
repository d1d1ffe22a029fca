"""KV geometry: shapes and bytes of a block, which ranks exchange what, blocks paired by token position, descriptors."""
