// Mapped stores: every peer's heap can be written with plain stores. `shm` on the host, `peer` on
// devices.
//
// Every transport supplies:
//   put(to, from, bytes, rank, slot)   all lanes: move bytes from this rank's data to the peer's,
//                                      each at an offset, then raise the flag
//   signal(rank, slot, value, tier, bytes)   one lane: raise a flag after the block's writes
//   seen(slot, value)   one lane: has the flag been raised in this call? acquires
//   peek(slot), stamp(value)   for error records
//   epoch()   of this call
//   can_send(tier)   would the link take more now?
//   progress(), quiet()   drive and test what is still on its way
//   progress_of_all(num_ranks)   a figure that changes while any rank gets on, for deadlines
//   aborted()   one lane: has this rank been told to leave?
//   raise_abort(word, num_ranks)   one lane: tell every rank to leave
//   pass_on_abort(num_ranks)   the last block of a rank that leaves because it was told to
#pragma once

#include "kernels/body/items.h"

namespace fastkern {

// The call's number: given, or the one after the last that ended here. The last block out of a call
// advances the word, after every block of it has read it.
template <class Target>
FASTKERN_DEVICE u64 epoch_of_call(const Target& target, const KernelArgs& args) {
    if (args.epoch) return args.epoch;
    return target.load_relaxed(&args.controls[args.rank]->epoch) + 1;
}

// A poll is relaxed, since most find nothing; only one that finds the flag acquires it. What it
// reads then is the same word or a later one of the same writer.
template <class Target>
FASTKERN_DEVICE bool seen_at(const Target& target, const u64* flag, u64 stamp) {
    return target.load_relaxed(flag) >= stamp && target.load_acquire(flag) >= stamp;
}

// The words of all ranks name the same origin: the first to reach the home word, that of rank
// `home`, whoever copies it on.
template <class Target>
FASTKERN_DEVICE void raise_abort_from(const Target& target, const KernelArgs& args, u64 word,
                                      u32 home, u32 num_ranks) {
    target.compare_and_swap(&args.controls[home]->abort, 0, word);
    const u64 first = target.load_acquire(&args.controls[home]->abort);
    for (u32 r = home; r < home + num_ranks; ++r)
        target.compare_and_swap(&args.controls[r]->abort, 0, first);
}

template <class Target>
class MappedTransport {
  public:
    FASTKERN_DEVICE MappedTransport(const Target& target, const KernelArgs& args)
        : target_(target), args_(args), epoch_(epoch_of_call(target, args)) {}

    FASTKERN_DEVICE void put(u64 to, u64 from, u64 bytes, u32 rank, u32 slot) const {
        target_.copy(args_.data[rank] + to, args_.data[args_.rank] + from, bytes);
        target_.drain();
        target_.barrier();
        if (target_.lane() == 0) signal(rank, slot, 1, kScaleOut, bytes);
    }
    FASTKERN_DEVICE void signal(u32 rank, u32 slot, u32 value, Tier, u64) const {
        target_.store_release(&args_.flags[rank][slot], stamp(value));
    }
    FASTKERN_DEVICE bool seen(u32 slot, u32 value) const {
        return seen_at(target_, &args_.flags[args_.rank][slot], stamp(value));
    }
    FASTKERN_DEVICE u64 peek(u32 slot) const {
        return target_.load_relaxed(&args_.flags[args_.rank][slot]);
    }
    FASTKERN_DEVICE u64 stamp(u32 value) const { return epoch_ << kValueBits | value; }
    FASTKERN_DEVICE u64 epoch() const { return epoch_; }
    FASTKERN_DEVICE bool can_send(Tier) const { return true; }
    FASTKERN_DEVICE void progress() const {}
    FASTKERN_DEVICE bool quiet() const { return true; }
    FASTKERN_DEVICE u64 progress_of_all(u32 num_ranks) const {
        return claims_of(target_, args_, 0, num_ranks);
    }
    FASTKERN_DEVICE bool aborted() const {
        return target_.load_acquire(&args_.controls[args_.rank]->abort) != 0;
    }
    FASTKERN_DEVICE void raise_abort(u64 word, u32 num_ranks) const {
        raise_abort_from(target_, args_, word, 0, num_ranks);
    }
    FASTKERN_DEVICE void pass_on_abort(u32) const {}

  private:
    const Target& target_;
    const KernelArgs& args_;
    const u64 epoch_;
};

}  // namespace fastkern
