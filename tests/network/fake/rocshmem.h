// The part of rocSHMEM that is called, on the simulated network.
#pragma once

#include "tests/network/fake/device/nvshmem_defines.h"

namespace rocshmem {

enum { ROCSHMEM_SIGNAL_SET, ROCSHMEM_SIGNAL_ADD };
enum { ROCSHMEM_CMP_GE };

inline void rocshmem_putmem_signal_nbi_wg(void* to, const void* from, size_t bytes, uint64_t* word,
                                          uint64_t value, int operation, int pe) {
    nvshmemx_putmem_signal_nbi_block(to, from, bytes, word, value, operation, pe);
}
inline void rocshmem_uint64_atomic_set(uint64_t* word, uint64_t value, int pe) {
    nvshmemx_signal_op(word, value, NVSHMEM_SIGNAL_SET, pe);
}
inline void rocshmem_uint64_atomic_add(uint64_t* word, uint64_t value, int pe) {
    nvshmemx_signal_op(word, value, NVSHMEM_SIGNAL_ADD, pe);
}
inline int rocshmem_ulonglong_test(unsigned long long* word, int, unsigned long long value) {
    return simulated::HostTarget::load_acquire(word) >= value;
}
inline void rocshmem_quiet() { nvshmem_quiet(); }

}  // namespace rocshmem
