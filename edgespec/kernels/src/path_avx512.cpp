#ifdef __AVX512VNNI__
#include "products.h"
namespace edgespec { extern const Path kAvx512; const Path kAvx512 = {"avx512-vnni", quantise, product}; }
#endif
