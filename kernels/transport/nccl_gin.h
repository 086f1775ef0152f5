// NCCL's device API (GIN) between servers: puts into windows of registered memory. Written against
// 2.32; compiled with nvcc (NVRTC drops the packing of NCCL's records), nothing to link.
//
// Flags are VA signals, words at an offset in the window. NCCL only adds to signals. A flag has one
// writer, so its writer keeps what it has set the flag to (`written`) and adds the difference. Two
// updates of one flag are never on their way together (see network.h), so no sum of a part of them
// is ever seen. When flags are zeroed, so must be `written`.
//
// Memory order. A weak signal vouches for the bytes of its own put and for no other: what a chunk's
// flag means. Strong signals, which order all earlier puts to the peer, are not needed. NCCL wants
// a signal's word read by readSignal, an acquire load at system scope. Before the put one lane
// releases at system scope what it has acquired: rows that blocks here and mapped peers have
// written.
//
// quiet() counts: each put adds to a counter of its context once its bytes have been read; `puts`
// are those begun.
//
// The host makes, with ranks in the order of the communicator's: a window of control words and
// flags, with NCCL_WIN_STRICT_ORDERING, and another of the data, which growth replaces; a device
// communicator whose LSA team is the server, with VA signals and one counter, strong signals not
// needed, connected along the rail (or in full, for direct mode). Not of type EFA_GDA, which knows
// no VA signals: the proxy serves there.
#pragma once

#define NCCL_GIN_EFA_GDA_ENABLE 0

#include <nccl_device.h>
//
#include "kernels/transport/network.h"

namespace fastkern {

template <class Target>
class GinWire {
  public:
    FASTKERN_DEVICE GinWire(const Target& target, const KernelArgs& args)
        : target_(target), args_(args) {}

    FASTKERN_DEVICE void put(u64 to, u64 from, u64 bytes, u32 rank, u32 slot, u64 stamp) const {
        if (target_.lane() == 0)
            start_put(args_, target_.block(), to, from, bytes, rank, slot, stamp);
    }
    FASTKERN_DEVICE void raise(u32 rank, u32 slot, u64 stamp) const {
        add(args_, target_.block(), rank, flag(args_, slot),
            exchange_written(args_, rank, slot, stamp));
    }
    FASTKERN_DEVICE bool seen(u32 slot, u64 stamp) const {
        const ncclGin gin = context(args_, 0);
        const u64 at = offset(args_, flag(args_, slot));
        return gin.readSignal(window(args_), at, 64, cuda::memory_order_relaxed) >= stamp &&
               gin.readSignal(window(args_), at, 64, cuda::memory_order_acquire) >= stamp;
    }
    FASTKERN_DEVICE void notify(u32 rank, u64 word) const {
        set(args_, target_.block(), rank, &args_.controls[args_.rank]->notice, word);
    }
    FASTKERN_DEVICE void beat(u32 rank) const {
        add(args_, target_.block(), rank, &args_.controls[args_.rank]->beats, 1);
    }
    FASTKERN_DEVICE bool quiet() const {
        const NetworkArgs& network = network_args(args_);
        const u32 num_contexts = comm(args_).ginContextCount;
        for (u32 k = 0; k < num_contexts; ++k) {
            const u64 done = context(args_, k).readCounter(kCounter, kCounterBits);
            const u64 left = target_.load_relaxed(&network.puts[k]) - done;
            if (left << (64 - kCounterBits)) return false;
        }
        return true;
    }

  private:
    static constexpr ncclGinCounter_t kCounter = 0;
    static constexpr int kCounterBits = 56;

    // Each once in a kernel. The code for all of NCCL's backends is inlined.
    static __device__ __noinline__ void start_put(const KernelArgs& args, u32 block, u64 to,
                                                  u64 from, u64 bytes, u32 rank, u32 slot,
                                                  u64 stamp) {
        const NetworkArgs& network = network_args(args);
        const u32 k = block % comm(args).ginContextCount;
        const ncclGin_WeakVASignalAdd signal{window(args), offset(args, flag(args, slot)),
                                             exchange_written(args, rank, slot, stamp)};
        const ncclWindow_t data = window_at(network.data_window);
        context(args, k).put(ncclTeamWorld(comm(args)), peer(args, rank), data, to, data, from,
                             bytes, signal, ncclGin_WeakCounterInc{kCounter}, ncclCoopThread{},
                             ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
        Target::fetch_add(&network.puts[k], 1);
    }
    static __device__ __noinline__ void add(const KernelArgs& args, u32 block, u32 rank,
                                            const u64* word, u64 value) {
        const ncclGin_WeakVASignalAdd signal{window(args), offset(args, word), value};
        context(args, block % comm(args).ginContextCount)
            .signal(ncclTeamWorld(comm(args)), peer(args, rank), signal, ncclCoopThread{},
                    ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
    }
    static __device__ __noinline__ void set(const KernelArgs& args, u32 block, u32 rank,
                                            const u64* word, u64 value) {
        context(args, block % comm(args).ginContextCount)
            .putValue(ncclTeamWorld(comm(args)), peer(args, rank), window(args), offset(args, word),
                      uint64_t{value});
    }

    // What to add to another rank's flag, which is then noted as written.
    static FASTKERN_DEVICE u64 exchange_written(const KernelArgs& args, u32 rank, u32 slot,
                                                u64 stamp) {
        const Header& h = *view_table(args.table).header;
        const FlagLayout flags{h.num_ranks, h.servers, h.gpus_per_server, h.chunk_slots};
        const u32 kind = slot == flags.ready(args.rank)    ? 0
                         : slot == flags.credit(args.rank) ? 1
                                                           : 2 + slot - flags.arrive(args.rank);
        u64* const written = network_args(args).written + rank * u64{2 + h.chunk_slots} + kind;
        const u64 before = Target::load_relaxed(written);
        Target::store_relaxed(written, stamp);
        return stamp - before;
    }

    static FASTKERN_DEVICE const ncclDevComm& comm(const KernelArgs& args) {
        return *reinterpret_cast<const ncclDevComm*>(network_args(args).comm);
    }
    static FASTKERN_DEVICE ncclWindow_t window(const KernelArgs& args) {
        return window_at(network_args(args).window);
    }
    static FASTKERN_DEVICE ncclWindow_t window_at(u8* handle) {
        return reinterpret_cast<ncclWindow_t>(handle);
    }
    static FASTKERN_DEVICE ncclGin context(const KernelArgs& args, u32 k) {
        return ncclGin(comm(args), static_cast<int>(k));
    }
    static FASTKERN_DEVICE int peer(const KernelArgs& args, u32 rank) {
        return static_cast<int>(network_args(args).peers[rank]);
    }
    static FASTKERN_DEVICE u64 offset(const KernelArgs& args, const void* p) {
        return static_cast<u64>(static_cast<const u8*>(p) - network_args(args).heap);
    }
    static FASTKERN_DEVICE u64* flag(const KernelArgs& args, u32 slot) {
        return &args.flags[args.rank][slot];
    }

    const Target& target_;
    const KernelArgs& args_;
};

template <class Target>
using GinTransport = NetworkTransport<Target, GinWire>;

}  // namespace fastkern
