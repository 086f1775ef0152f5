// rocSHMEM between servers. Written against the documentation of 3.x; what a kernel calls is left
// undefined here and linked from rocSHMEM's device library. FASTKERN_ROCSHMEM_HEADER names its
// header (<rocshmem/rocshmem.hpp>, which needs HIP's); without it the calls are as
// rocshmem_declarations.h has them.
//
// A symmetric address is the local address of the same object, with a PE. All that others put here
// lies in rocSHMEM's heap. All blocks share the default context.
//
// Memory order. put() is the put with signal by the whole workgroup: the flag follows its bytes.
// Reads of what was put are ordered behind rocSHMEM's own test of the flag; the acquire after it
// drops what caches hold of the memory, for rows that a NIC or a mapped peer has written. The bytes
// that a put reads are in memory: whoever wrote them drained before it raised the pack flag.
//
// quiet() waits, for there is no test for completion; only this rank's own puts are waited for,
// whose arrival other ranks' flags do not depend on. A rank that leaves because of an abort does
// not call it.
#pragma once

#ifdef FASTKERN_ROCSHMEM_HEADER
#include FASTKERN_ROCSHMEM_HEADER
#else
#include "kernels/transport/rocshmem_declarations.h"
#endif
//
#include "kernels/transport/network.h"

namespace fastkern {

template <class Target>
class RocshmemWire {
    using Word = __UINT64_TYPE__;

  public:
    FASTKERN_DEVICE RocshmemWire(const Target& target, const KernelArgs& args)
        : target_(target), args_(args) {}

    FASTKERN_DEVICE void put(u64 to, u64 from, u64 bytes, u32 rank, u32 slot, u64 stamp) const {
        u8* const data = args_.data[args_.rank];
        rocshmem::rocshmem_putmem_signal_nbi_wg(data + to, data + from, bytes, word(flag(slot)),
                                                stamp, rocshmem::ROCSHMEM_SIGNAL_SET, pe(rank));
    }
    FASTKERN_DEVICE void raise(u32 rank, u32 slot, u64 stamp) const {
        rocshmem::rocshmem_uint64_atomic_set(word(flag(slot)), stamp, pe(rank));
    }
    FASTKERN_DEVICE bool seen(u32 slot, u64 stamp) const {
        if (target_.load_relaxed(flag(slot)) < stamp) return false;
        return rocshmem::rocshmem_ulonglong_test(flag(slot), rocshmem::ROCSHMEM_CMP_GE, stamp) &&
               target_.load_acquire(flag(slot)) >= stamp;
    }
    FASTKERN_DEVICE void notify(u32 rank, u64 value) const {
        rocshmem::rocshmem_uint64_atomic_set(word(&args_.controls[args_.rank]->notice), value,
                                             pe(rank));
    }
    FASTKERN_DEVICE void beat(u32 rank) const {
        rocshmem::rocshmem_uint64_atomic_add(word(&args_.controls[args_.rank]->beats), 1, pe(rank));
    }
    FASTKERN_DEVICE bool quiet() const {
        rocshmem::rocshmem_quiet();
        return true;
    }

  private:
    static FASTKERN_DEVICE Word* word(u64* p) { return reinterpret_cast<Word*>(p); }
    FASTKERN_DEVICE u64* flag(u32 slot) const { return &args_.flags[args_.rank][slot]; }
    FASTKERN_DEVICE int pe(u32 rank) const {
        return static_cast<int>(network_args(args_).peers[rank]);
    }

    const Target& target_;
    const KernelArgs& args_;
};

template <class Target>
using RocshmemTransport = NetworkTransport<Target, RocshmemWire>;

}  // namespace fastkern
