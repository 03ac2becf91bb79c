# Read by CMake when llama-cpp-python compiles llama.cpp (see run.py). llama-cpp-python asks for the tools' common
# library, which nothing here loads and which is a third of the work; it cannot be switched off from outside.
set(LLAMA_BUILD_COMMON OFF)
