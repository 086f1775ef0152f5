// Entering a call on the device: every rank's record to every rank. One block per rank.
//
// A record crosses once to each other server, to the same-index peer, which copies it to the ranks
// of its own: R words to R ranks would not scale. Records lie in the data part of the heap, two
// sets of [R] in turn by entry: a rank that has entered entry e + 1 has left e, and no rank enters
// e + 2 before all have entered e + 1; so a set is free when it is written again.
//
// Who writes what (rank r of server s, local rank l; every slot has one writer): row r at the peers
// (., l), then rail[s] there; those peers copy it to the rows r of their server, then local[r]
// there. Entry is what says that buffers are free, so it waits for no flag itself.
//
// Memory order: as everywhere, see exchange.h. Flags are stamped with the epoch of the launch that
// follows.
//
// Example, 2 servers x 2 ranks. Rank 1 puts its record to rank 3, with rail[0] there, and copies it
// to rank 0, with local[1] there. When rank 3's record has come, with rail[1], it copies that to
// rank 0, with local[3]. It waits for local[0] and local[2], which rank 0 writes, and has all four.
#pragma once

#include "kernels/body/pick.h"

namespace fastkern {

// Where records and flags of an entry are.
struct EntryBoard {
    u64 records;  // offset in a rank's data
    u64 record_bytes;
    u64 entry;
    u32 first_slot;
    u32 num_ranks, servers, gpus_per_server;

    FASTKERN_DEVICE u64 row(u32 rank) const {
        return records + (entry % 2 * num_ranks + rank) * record_bytes;
    }
    FASTKERN_DEVICE u32 rail(u32 server) const { return first_slot + server; }
    FASTKERN_DEVICE u32 local(u32 rank) const { return first_slot + servers + rank; }
};

// One lane. Waits until the flag has come, and returns false when the call is aborted. On expiry it
// names the relay that raises the flag, or, where that has entered itself, the source.
template <class Call>
FASTKERN_DEVICE bool await_entry(const Call& call, const EntryBoard& board, u32 slot, u32 source,
                                 u32 relay, u64 entry_ns) {
    const u64 begin = call.target.now_ns();
    for (u32 rounds = 0; !call.transport.seen(slot, 1); ++rounds) {
        if (call.transport.aborted()) return false;
        const u64 waited = call.target.now_ns() - begin;
        if (waited > entry_ns) {
            ErrorRecord record{};
            record.expected = call.transport.stamp(1);
            record.seen = call.transport.peek(slot);
            record.waited_ns = waited;
            record.queue = kEntryWait;
            record.peer = call.transport.seen(board.local(relay), 1) ? source : relay;
            record.slot = slot;
            abort_call(call, record);
            return false;
        }
        call.transport.progress();
        call.target.pause(rounds);
    }
    return true;
}

// All lanes. This rank's record is in its own row, written by them. Returns false when the call is
// aborted, else all rows are here.
template <class Call>
FASTKERN_DEVICE bool enter_call(const Call& call, const EntryBoard& board, u64 entry_ns) {
    const auto& target = call.target;
    const u32 rank = call.args().rank, m = board.gpus_per_server;
    const u32 server = rank / m, first_local = server * m;
    target.drain();
    target.barrier();
    for (u32 k = 1; k < board.servers; ++k) {
        const u32 peer = (rank + k * m) % board.num_ranks;
        call.transport.put(board.row(rank), board.row(rank), board.record_bytes, peer,
                           board.rail(server));
    }
    for (u32 k = 0; k < board.servers; ++k) {  // own rank's first, then servers in turn
        const u32 source = (rank + k * m) % board.num_ranks;
        if (k != 0) {
            const u32 slot = board.rail(source / m);
            const auto& came = target.template broadcast<u32>([&](u32& word) {
                word = await_entry(call, board, slot, source, source, entry_ns);
            });
            if (!came) return false;
        }
        const u64 row = board.row(source);
        for (u32 j = 1 + target.team(); j < m; j += target.num_teams()) {
            const u32 peer = first_local + (rank - first_local + j) % m;
            target.team_copy(call.args().data[peer] + row, call.own_data() + row,
                             static_cast<u32>(board.record_bytes));
        }
        target.drain();
        target.barrier();
        for (u32 j = 1 + target.lane(); j < m; j += target.num_lanes())
            call.transport.signal(first_local + (rank - first_local + j) % m, board.local(source),
                                  1, kScaleUp, board.record_bytes);
    }
    for (u32 r = target.lane(); r < board.num_ranks; r += target.num_lanes())
        if (r % m != rank - first_local)
            if (!await_entry(call, board, board.local(r), r, first_local + r % m, entry_ns)) break;
    target.drain();  // every wave's acquires end before the barrier
    target.barrier();
    return target.template broadcast<u32>([&](u32& word) { word = call.transport.aborted(); }) == 0;
}

}  // namespace fastkern
