// What CUDA and HIP know without a header, on the host.
#pragma once

#define __device__
#define __noinline__ __attribute__((noinline))
