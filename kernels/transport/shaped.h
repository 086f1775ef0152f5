// Shaped `shm`: each rank's egress and ingress of both tiers are serialised at a set rate.
//
// Bytes are copied at once, but a flag can be seen only when a link of the set rate would have
// delivered them: the sender books its egress, then the receiver's ingress (a switch with unbounded
// buffers between them: no loss, no head-of-line blocking, so the baselines lose nothing to the
// simulation). A sender books no further than 1 ms into the future, so that bookings follow the
// order of arrival.
#pragma once

#include "kernels/transport/mapped.h"

namespace fastkern {

template <class Target>
class ShapedTransport : public MappedTransport<Target> {
    using Base = MappedTransport<Target>;

  public:
    ShapedTransport(const Target& target, const KernelArgs& args, const ShapedRates& rates)
        : Base(target, args), target_(target), args_(args), rates_(rates) {}

    void put(u64 to, u64 from, u64 bytes, u32 rank, u32 slot) const {
        target_.copy(args_.data[rank] + to, args_.data[args_.rank] + from, bytes);
        target_.drain();
        target_.barrier();
        if (target_.lane() == 0) signal(rank, slot, 1, kScaleOut, bytes);
    }

    void signal(u32 rank, u32 slot, u32 value, Tier tier, u64 bytes) const {
        u64 visible = 0;
        if (bytes && rates_.ps_per_kib[tier]) {
            const u64 ns = static_cast<u64>(static_cast<unsigned __int128>(bytes) *
                                            rates_.ps_per_kib[tier] / 1024 / 1000);
            const u64 sent =
                book(&args_.controls[args_.rank]->egress_free_ns[tier], target_.now_ns(), ns);
            visible = book(&args_.controls[rank]->ingress_free_ns[tier], sent - ns, ns);
        }
        target_.store_relaxed(&args_.visible_ns[rank][slot], visible);
        target_.store_release(&args_.flags[rank][slot], Base::stamp(value));
    }

    bool seen(u32 slot, u32 value) const {
        if (!Base::seen(slot, value)) return false;
        const u64 visible = target_.load_relaxed(&args_.visible_ns[args_.rank][slot]);
        return visible == 0 || visible <= target_.now_ns();
    }

    bool can_send(Tier tier) const {
        if (!rates_.ps_per_kib[tier]) return true;
        return target_.load_relaxed(&args_.controls[args_.rank]->egress_free_ns[tier]) <=
               target_.now_ns() + kAheadNs;
    }

    u64 progress_of_all(u32 num_ranks) const {
        const u64 now = target_.now_ns();
        for (u32 r = 0; r < num_ranks; ++r)  // bytes on a link are progress
            for (u32 tier = 0; tier < kNumTiers; ++tier)
                if (target_.load_relaxed(&args_.controls[r]->ingress_free_ns[tier]) > now)
                    return now;
        return Base::progress_of_all(num_ranks);
    }
    bool quiet() const {
        for (u32 tier = 0; tier < kNumTiers; ++tier)
            if (target_.load_relaxed(&args_.controls[args_.rank]->egress_free_ns[tier]) >
                target_.now_ns())
                return false;
        return true;
    }

  private:
    static constexpr u64 kAheadNs = 1'000'000;

    // Adds `ns` to a link that is free at *free_ns, not before `from`; returns when they end.
    u64 book(u64* free_ns, u64 from, u64 ns) const {
        for (;;) {
            const u64 free = target_.load_relaxed(free_ns);
            const u64 end = (free > from ? free : from) + ns;
            if (target_.compare_and_swap(free_ns, free, end) == free) return end;
        }
    }

    const Target& target_;
    const KernelArgs& args_;
    const ShapedRates rates_;
};

}  // namespace fastkern
