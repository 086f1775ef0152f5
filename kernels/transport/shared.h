// A network on the host, for tests of what sets networks up: its library is memory that is mapped
// under addresses which the kernel's arguments do not have. Nothing is late and nothing reordered
// here (tests/network does that to the wires of the real libraries).
//
// Of NetworkArgs: peers are places in the two tables of addresses that `window` (of control words)
// and `data_window` point to; `heap` is where this rank's control words begin.
#pragma once

#include "kernels/transport/network.h"

namespace fastkern {

template <class Target>
class SharedWire {
  public:
    FASTKERN_DEVICE SharedWire(const Target& target, const KernelArgs& args)
        : target_(target), args_(args) {}

    FASTKERN_DEVICE void put(u64 to, u64 from, u64 bytes, u32 rank, u32 slot, u64 stamp) const {
        const NetworkArgs& network = network_args(args_);
        u8* const data = bases(network.data_window)[network.peers[rank]];
        target_.copy(data + to, args_.data[args_.rank] + from, bytes);
        target_.drain();
        target_.barrier();
        if (target_.lane() == 0) raise(rank, slot, stamp);
    }
    FASTKERN_DEVICE void raise(u32 rank, u32 slot, u64 stamp) const {
        target_.store_release(there(rank, &args_.flags[args_.rank][slot]), stamp);
    }
    FASTKERN_DEVICE bool seen(u32 slot, u64 stamp) const {
        return seen_at(target_, &args_.flags[args_.rank][slot], stamp);
    }
    FASTKERN_DEVICE void notify(u32 rank, u64 word) const {
        target_.store_release(there(rank, &args_.controls[args_.rank]->notice), word);
    }
    FASTKERN_DEVICE void beat(u32 rank) const {
        Target::fetch_add(there(rank, &args_.controls[args_.rank]->beats), 1);
    }
    FASTKERN_DEVICE bool quiet() const { return true; }

  private:
    static FASTKERN_DEVICE u8* const* bases(const u8* table) {
        return reinterpret_cast<u8* const*>(table);
    }
    // The same word on another rank.
    FASTKERN_DEVICE u64* there(u32 rank, const u64* p) const {
        const NetworkArgs& network = network_args(args_);
        u8* const base = bases(network.window)[network.peers[rank]];
        return reinterpret_cast<u64*>(base + (reinterpret_cast<const u8*>(p) - network.heap));
    }

    const Target& target_;
    const KernelArgs& args_;
};

template <class Target>
using SharedTransport = NetworkTransport<Target, SharedWire>;

}  // namespace fastkern
