// Networks: mapped stores inside a server, a library's one-sided puts between servers. What differs
// from library to library is its wire (nvshmem.h, nccl_gin.h, rocshmem.h).
//
// Every wire supplies:
//   put(to, from, bytes, rank, slot, stamp)   all lanes: start moving the bytes to another server;
//                                             once they are there, the flag is set to `stamp`
//   raise(rank, slot, stamp)   one lane: set a flag on another server
//   seen(slot, stamp)   one lane: is this rank's flag at `stamp`, or past it? acquires
//   notify(rank, word)   one lane: Control.notice = word on another server
//   beat(rank)   one lane: Control.beats += 1 on another server
//   quiet()   one lane: have all puts of this rank been read from its staging?
// None of them reads from another server. None waits for one but quiet(), where it must.
//
// Memory order, of a chunk that crosses:
//   rows -> send staging, by blocks here or on a rank of this server; they signal pack (release)
//   a lane of the putting block acquires pack; block barrier; put() by all lanes: what the library
//     reads for the network is behind that barrier
//   the library sets the flag after the bytes have arrived: it vouches for that chunk alone, and no
//     order between chunks is relied upon
//   at the receiver one lane sees the flag by the library's own means and acquires it; block
//     barrier; all lanes read
// A flag that raise() sets (ready, credit) vouches for no bytes. Whoever writes it a second time
// has got something from the rank that saw the first (see exchange.h), so one update per flag is on
// its way at most.
//
// Deadlines and aborts do not read across servers either:
//   beats   A rank that looks for work tells its same-index peers, 8 times in a deadline at most,
//           when its server has claimed something since. So the claims here and the beats that came
//           in change while any rank gets on anywhere.
//   abort   Inside a server as with mapped stores, its first rank keeping the home word. Every rank
//           that leaves also puts the word into `notice` of its same-index peers, who copy it to
//           their server. Two servers that give up at once may name different origins.
#pragma once

#include "kernels/transport/mapped.h"
#include "kernels/transport/network_args.h"

namespace fastkern {

FASTKERN_DEVICE inline const NetworkArgs& network_args(const KernelArgs& args) {
    return *reinterpret_cast<const NetworkArgs*>(args.network);
}

template <class Target, template <class> class Wire>
class NetworkTransport {
  public:
    FASTKERN_DEVICE NetworkTransport(const Target& target, const KernelArgs& args)
        : target_(target),
          args_(args),
          wire_(target, args),
          epoch_(epoch_of_call(target, args)),
          num_local_(view_table(Target::constant(args.table)).header->gpus_per_server),
          first_local_(args.rank / num_local_ * num_local_) {}

    FASTKERN_DEVICE void put(u64 to, u64 from, u64 bytes, u32 rank, u32 slot) const {
        wire_.put(to, from, bytes, rank, slot, stamp(1));
    }
    FASTKERN_DEVICE void signal(u32 rank, u32 slot, u32 value, Tier, u64) const {
        if (rank - first_local_ < num_local_)
            target_.store_release(&args_.flags[rank][slot], stamp(value));
        else
            wire_.raise(rank, slot, stamp(value));
    }
    FASTKERN_DEVICE bool seen(u32 slot, u32 value) const { return wire_.seen(slot, stamp(value)); }
    FASTKERN_DEVICE u64 peek(u32 slot) const {
        return target_.load_relaxed(&args_.flags[args_.rank][slot]);
    }
    FASTKERN_DEVICE u64 stamp(u32 value) const { return epoch_ << kValueBits | value; }
    FASTKERN_DEVICE u64 epoch() const { return epoch_; }
    FASTKERN_DEVICE bool can_send(Tier) const { return true; }
    FASTKERN_DEVICE void progress() const {
        if (++looks_ % kLooksPerBeat == 0) beat();
    }
    FASTKERN_DEVICE bool quiet() const { return wire_.quiet(); }
    FASTKERN_DEVICE u64 progress_of_all(u32) const {
        u64 sum = claims_of(target_, args_, first_local_, num_local_);
        for (u32 r = first_local_; r < first_local_ + num_local_; ++r)
            sum += target_.load_relaxed(&args_.controls[r]->beats);
        return sum;
    }
    FASTKERN_DEVICE bool aborted() const {
        Control* const own = args_.controls[args_.rank];
        if (target_.load_acquire(&own->abort) != 0) return true;
        const u64 notice = target_.load_relaxed(&own->notice);
        if (notice == 0) return false;
        raise_abort_from(target_, args_, notice, first_local_, num_local_);
        return true;
    }
    FASTKERN_DEVICE void raise_abort(u64 word, u32 num_ranks) const {
        raise_abort_from(target_, args_, word, first_local_, num_local_);
        pass_on_abort(num_ranks);
    }
    FASTKERN_DEVICE void pass_on_abort(u32 num_ranks) const {
        const u64 word = target_.load_acquire(&args_.controls[args_.rank]->abort);
        for (u32 r = args_.rank - first_local_; r < num_ranks; r += num_local_)
            if (r != args_.rank) wire_.notify(r, word);
    }

  private:
    static constexpr u32 kLooksPerBeat = 16;  // looks for work until the clock is read again
    static constexpr u32 kBeatsPerDeadline = 8;

    FASTKERN_DEVICE void beat() const {
        Control* const own = args_.controls[args_.rank];
        const u64 now = target_.now_ns();
        const u64 last = target_.load_relaxed(&own->last_beat_ns);
        if (now - last < args_.progress_ns / kBeatsPerDeadline) return;
        if (target_.compare_and_swap(&own->last_beat_ns, last, now) != last)
            return;  // another block does
        const u64 claims = claims_of(target_, args_, first_local_, num_local_);
        if (claims == target_.load_relaxed(&own->last_beat_claims)) return;
        target_.store_relaxed(&own->last_beat_claims, claims);
        const u32 num_ranks = view_table(args_.table).header->num_ranks;
        for (u32 r = args_.rank - first_local_; r < num_ranks; r += num_local_)
            if (r != args_.rank) wire_.beat(r);
    }

    const Target& target_;
    const KernelArgs& args_;
    const Wire<Target> wire_;
    const u64 epoch_;
    const u32 num_local_;    // ranks of a server
    const u32 first_local_;  // of this one
    mutable u32 looks_ = 0;
};

}  // namespace fastkern
