# Read by CMake when llama-cpp-python compiles llama.cpp (see run.py). llama-cpp-python asks for the tools' common
# library, which nothing here loads and which is a third of the work; it cannot be switched off from outside.
set(LLAMA_BUILD_COMMON OFF)
# GCC 12 knows of 8 of the 64 bytes that `_tile_loadconfig` reads and drops the stores of the others: on a processor with
# AMX the first pass would end the process.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14
   AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_compile_options(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()
