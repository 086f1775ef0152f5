// Mapped stores: every peer's heap can be written with plain stores. `shm` on the host, `peer` on
// devices.
//
// Every transport supplies:
//   put(to, from, bytes, rank, slot)   all lanes: move the bytes, then raise the flag
//   signal(rank, slot, value, tier, bytes)   one lane: raise a flag after the block's writes
//   seen(slot, value)   one lane: has the flag been raised in this call? acquires
//   peek(slot), stamp(value)   for error records
//   can_send(tier)   would the link take more now?
//   progress(), quiet()   drive and test what is still on its way
//   progress_of_all(num_ranks)   a figure that changes while any rank gets on, for deadlines
#pragma once

#include "kernels/body/items.h"

namespace fastkern {

template <class Target>
class MappedTransport {
  public:
    FASTKERN_DEVICE MappedTransport(const Target& target, const KernelArgs& args)
        : target_(target), args_(args) {}

    FASTKERN_DEVICE void put(u8* to, const u8* from, u64 bytes, u32 rank, u32 slot) const {
        target_.copy(to, from, bytes);
        target_.drain();
        target_.barrier();
        if (target_.lane() == 0) signal(rank, slot, 1, kScaleOut, bytes);
    }
    FASTKERN_DEVICE void signal(u32 rank, u32 slot, u32 value, Tier, u64) const {
        target_.store_release(&args_.flags[rank][slot], stamp(value));
    }
    FASTKERN_DEVICE bool seen(u32 slot, u32 value) const {
        return target_.load_acquire(&args_.flags[args_.rank][slot]) >= stamp(value);
    }
    FASTKERN_DEVICE u64 peek(u32 slot) const {
        return target_.load_relaxed(&args_.flags[args_.rank][slot]);
    }
    FASTKERN_DEVICE u64 stamp(u32 value) const { return args_.epoch << kValueBits | value; }
    FASTKERN_DEVICE bool can_send(Tier) const { return true; }
    FASTKERN_DEVICE void progress() const {}
    FASTKERN_DEVICE u64 progress_of_all(u32 num_ranks) const {
        return claims_of_all(target_, args_, num_ranks);
    }
    FASTKERN_DEVICE bool quiet() const { return true; }

  private:
    const Target& target_;
    const KernelArgs& args_;
};

}  // namespace fastkern
