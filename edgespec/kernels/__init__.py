"""Our own processor kernels: C++ sources, how they are compiled, and the library that is found for ONNX Runtime."""
