"""The llama.cpp engine: GGUF models on CPUs, Apple Silicon and consumer GPUs."""
