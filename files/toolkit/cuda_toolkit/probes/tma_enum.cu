// This tensor-map swizzle mode came with CUDA 12.8. Headers of an older toolkit fail here.
#include <cuda.h>

extern "C" __global__ void probe_tma_enum(int *result)
{
    *result = static_cast<int>(CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B);
}
