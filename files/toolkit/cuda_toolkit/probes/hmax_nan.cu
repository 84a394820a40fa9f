// __hmax_nan(__half, __half) is declared for every architecture from CUDA 12.2 on;
// before that only for sm_80 and newer. Headers of an older toolkit fail here.
#include <cuda_fp16.h>

extern "C" __global__ void probe_hmax_nan(__half *values)
{
    values[0] = __hmax_nan(values[1], values[2]);
}
