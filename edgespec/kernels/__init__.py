"""CPU kernels: products of float activations with a GGUF's own quantised weights, packed into tiles (C++ in `src/`)."""
