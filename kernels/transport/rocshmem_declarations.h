// The few device functions of rocSHMEM that are called, as its documentation describes them: so
// that kernels compile where rocSHMEM is not installed. Where it is, its own header takes the place
// of this one (FASTKERN_ROCSHMEM_HEADER).
#pragma once

namespace rocshmem {

using Size = __SIZE_TYPE__;
using Word = __UINT64_TYPE__;  // uint64_t of the system, on which the names in the library depend

// Only those that are used. `operation` and `comparison` below are ints.
enum ROCSHMEM_SIGNAL_OPS { ROCSHMEM_SIGNAL_SET, ROCSHMEM_SIGNAL_ADD };
enum rocshmem_cmps { ROCSHMEM_CMP_EQ, ROCSHMEM_CMP_NE, ROCSHMEM_CMP_GT, ROCSHMEM_CMP_GE };

// By all work-items of a workgroup, with the same arguments: put `bytes`, then set (or add to) the
// signal. `to` and `signal` are symmetric addresses. Returns when the transfer has been started.
__device__ void rocshmem_putmem_signal_nbi_wg(void* to, const void* from, Size bytes, Word* signal,
                                              Word value, int operation, int pe);

// By one work-item: *p = value, *p += value, atomically, on `pe`.
__device__ void rocshmem_uint64_atomic_set(Word* p, Word value, int pe);
__device__ void rocshmem_uint64_atomic_add(Word* p, Word value, int pe);

// 1 if the local word compares so with `value`, else 0.
__device__ int rocshmem_ulonglong_test(unsigned long long* p, int comparison,
                                       unsigned long long value);

// Waits for all operations of the default context.
__device__ void rocshmem_quiet();

}  // namespace rocshmem
