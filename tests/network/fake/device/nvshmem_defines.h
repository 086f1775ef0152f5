// The part of NVSHMEM that is called, on the simulated network.
#pragma once

#include "tests/network/simulated.h"

enum { NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD };
enum { NVSHMEM_CMP_GE };

inline simulated::u64* nvshmem_word(uint64_t* p) { return reinterpret_cast<simulated::u64*>(p); }

inline void nvshmemx_signal_op(uint64_t* word, uint64_t value, int operation, int pe) {
    simulated::Transfer t;
    t.word = simulated::on(static_cast<simulated::u32>(pe), nvshmem_word(word));
    t.value = value;
    t.add = operation == NVSHMEM_SIGNAL_ADD;
    simulated::place->nic->begin(t);
}

inline void nvshmemx_putmem_signal_nbi_block(void* to, const void* from, size_t bytes,
                                             uint64_t* word, uint64_t value, int operation,
                                             int pe) {
    simulated::lane->barrier();
    if (simulated::lane->lane() == 0) {
        const simulated::u32 rank = static_cast<simulated::u32>(pe);
        simulated::Transfer t;
        t.to = simulated::on(rank, static_cast<simulated::u8*>(to));
        t.from = static_cast<const simulated::u8*>(from);
        t.bytes = bytes;
        t.word = simulated::on(rank, nvshmem_word(word));
        t.value = value;
        t.add = operation == NVSHMEM_SIGNAL_ADD;
        simulated::place->nic->begin(t);
    }
    simulated::lane->barrier();
}

inline int nvshmem_uint64_test(uint64_t* word, int, uint64_t value) {
    return simulated::HostTarget::load_acquire(nvshmem_word(word)) >= value;
}

inline void nvshmem_quiet() {
    while (!simulated::place->nic->idle()) std::this_thread::yield();
}
