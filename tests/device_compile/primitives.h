// Each operation of a target header in a kernel of its own, and the two that the protocol is made
// of: to wait for a flag, and to raise one. The tests judge each from its assembly.
//
// Pointers are read from memory, as the bodies read theirs: so the compiler knows nothing of them.
#pragma once

#include "kernels/body/exchange.h"
#include "kernels/transport/mapped.h"

namespace fastkern {

struct Pointers {
    u8* to;
    const u8* from;
    u64* word;
    u64* words;
};

struct PrimitiveArgs {
    const Pointers* pointers;
    const KernelArgs* call;
    u64 number;
    u64 other;
    u32 slot;
    u32 value;
};

// Two numbers, as a record that is shared or kept.
struct Pair {
    u64 first, second;
};

template <class Target>
struct Primitives {
    const Target& target;
    const PrimitiveArgs& args;

    // What a kernel finds out, a word of each lane.
    FASTKERN_DEVICE void tell(u64 result) const {
        Target::store8(args.pointers->to + u64{target.lane()} * 8, result);
    }

    // As a lane of the picker waits for a flag, and then reads what it vouches for.
    FASTKERN_DEVICE void wait() const {
        const MappedTransport<Target> transport(target, *args.call);
        for (u32 rounds = 0; !transport.seen(args.slot, args.value); ++rounds) target.pause(rounds);
        tell(*reinterpret_cast<const u64*>(Target::global(args.pointers->from)));
    }
    // All lanes write, one raises the flag.
    FASTKERN_DEVICE void signal() const {
        const MappedTransport<Target> transport(target, *args.call);
        const Call<Target, MappedTransport<Target>> call{target, transport, args.call};
        tell(args.number);
        signal_after_writes(call, args.value, args.slot, kScaleUp, 0);
    }
    // What lane 0 acquires, all lanes may read; twice, for the slots take turns.
    FASTKERN_DEVICE void broadcast() const {
        u64 sum = 0;
        for (u32 k = 0; k < 2; ++k) {
            const u64& told = target.template broadcast<u64>(
                [&](u64& word) { word = Target::load_acquire(args.pointers->words + k); });
            sum += told + Target::load8(args.pointers->from + u64{target.lane()} * 8);
        }
        tell(sum);
    }

    FASTKERN_DEVICE void barrier() const {
        target.template shared<u64[512]>()[target.lane()] = args.number;
        target.barrier();
        tell(target.template shared<u64[512]>()[target.lane() ^ 1]);
    }
    FASTKERN_DEVICE void share() const {
        const Pair& pair = target.share(*reinterpret_cast<const Pair*>(args.pointers->from));
        tell(pair.first * pair.second);
    }
    FASTKERN_DEVICE void keep() const {
        const auto make = [this] { return Pair{args.number + args.other, args.number}; };
        target.keep(make());
        decltype(auto) pair = target.template kept<Pair>(make);
        tell(pair.first * pair.second);
    }
    // Reads the same twice.
    FASTKERN_DEVICE void forget() const {
        const Pair* pair = reinterpret_cast<const Pair*>(Target::constant(args.pointers->from));
        Target::store_relaxed(args.pointers->word, pair->first);
        Target::forget(&pair);
        Target::store_relaxed(args.pointers->word, pair->first);
    }
    FASTKERN_DEVICE void constant() const {
        const Pair* pair = reinterpret_cast<const Pair*>(Target::constant(args.pointers->from));
        tell(pair->second);
    }
    FASTKERN_DEVICE void global() const {
        tell(reinterpret_cast<const u64*>(Target::global(args.pointers->from))[target.lane()]);
    }

    FASTKERN_DEVICE void drain() const {
        tell(args.number);
        target.drain();
    }
    FASTKERN_DEVICE void copy() const {
        target.copy(args.pointers->to, args.pointers->from, args.number);
    }
    FASTKERN_DEVICE void team_copy() const {
        target.team_copy(args.pointers->to, args.pointers->from, args.value);
    }

    FASTKERN_DEVICE void lane() const { tell(0); }
    FASTKERN_DEVICE void num_lanes() const { tell(target.num_lanes()); }
    FASTKERN_DEVICE void block() const { tell(target.block()); }
    FASTKERN_DEVICE void team() const { tell(target.team()); }
    FASTKERN_DEVICE void num_teams() const { tell(target.num_teams()); }
    FASTKERN_DEVICE void team_lane() const { tell(target.team_lane()); }
    FASTKERN_DEVICE void team_lanes() const { tell(target.team_lanes()); }
    FASTKERN_DEVICE void team_rank() const {
        u32 total = 0;
        const u32 rank = target.team_rank(given() > args.value, &total);
        tell(u64{rank} << 32 | total);
    }
    FASTKERN_DEVICE void team_pick() const {
        tell(target.team_pick(given(), given() > args.value));
    }
    FASTKERN_DEVICE void team_read() const { tell(target.team_read(given(), args.value)); }
    FASTKERN_DEVICE void uniform() const { tell(Target::uniform(given())); }

    FASTKERN_DEVICE void pause() const { target.pause(args.value); }
    FASTKERN_DEVICE void now_ns() const {
        const u64 begin = target.now_ns();
        tell(target.now_ns() - begin);
    }

    FASTKERN_DEVICE void load_relaxed() const { tell(Target::load_relaxed(args.pointers->word)); }
    FASTKERN_DEVICE void load_acquire() const { tell(Target::load_acquire(args.pointers->word)); }
    FASTKERN_DEVICE void store_relaxed() const {
        Target::store_relaxed(args.pointers->word, args.number);
    }
    FASTKERN_DEVICE void store_release() const {
        Target::store_release(args.pointers->word, args.number);
    }
    FASTKERN_DEVICE void fetch_add() const {
        tell(Target::fetch_add(args.pointers->words + target.lane(), args.number));
    }
    FASTKERN_DEVICE void compare_and_swap() const {
        tell(Target::compare_and_swap(args.pointers->words + target.lane(), args.number,
                                      args.other));
    }

    FASTKERN_DEVICE void load16() const {
        const Words16 words = Target::load16(args.pointers->from + u64{target.lane()} * 16);
        tell(u64{words.x ^ words.y} << 32 | (words.z ^ words.w));
    }
    FASTKERN_DEVICE void load8() const {
        tell(Target::load8(args.pointers->from + u64{target.lane()} * 8));
    }
    FASTKERN_DEVICE void store16() const {
        Target::store16(args.pointers->to + u64{target.lane()} * 16,
                        Words16{args.slot, args.value, args.slot, args.value});
    }
    FASTKERN_DEVICE void store8() const { tell(args.number); }

    FASTKERN_DEVICE void product() const {
        const auto floats = reinterpret_cast<const float*>(Target::global(args.pointers->from));
        const auto doubles = reinterpret_cast<const double*>(floats);
        const float float_sum = Target::product(floats[0], floats[1]) + floats[2];
        const double double_sum = Target::product(doubles[0], doubles[1]) + doubles[2];
        *reinterpret_cast<double*>(Target::global(args.pointers->to)) = float_sum + double_sum;
    }

    // A number of each lane.
    FASTKERN_DEVICE u32 given() const {
        return static_cast<u32>(Target::load8(args.pointers->from + u64{target.lane()} * 8));
    }
};

}  // namespace fastkern
