// The puts of one server, in or out, with what each of its ranks needs to know of them.
#pragma once

#include <algorithm>

#include "planner/core/lower.h"

namespace fastkern {

// One put of this server, in or out, with what every rail of it needs to know.
struct ServerPut {
    const Put* put;
    u32 other;        // the other server
    u32 num_chunks;   // of the longest rail
    u32 first_chunk;  // chunks of earlier puts of the same pair
    u32 occurrence;   // puts of the pair on our rail so far, this one included; 0: none here
    u64 chunk_rows;
    u64 remote_row;  // first row at the peer: out: in its receive staging; in: in its send staging
                     // (of a dispatch; else not computed)
    std::size_t rail;  // first of M entries in the arrays below
};

struct ServerPuts {
    Vector<ServerPut> puts;
    Vector<u64> part_begin, part_rows, staging_row;  // [put][rail]
};

// In the plan's order; those that carry nothing on any rail are left out.
void collect_puts(const TableBuilder& t, bool out, ServerPuts* result);

// Calls emit(piece, stream_row, offset, num_rows) for the parts of rail `rail`'s pieces inside the
// put.
template <class Emit>
void for_each_part(const TilePieces& tile, u32 rail, u64 begin, u64 rows, const Emit& emit) {
    for (u32 k = tile.rail_begin[rail]; k < tile.rail_begin[rail + 1]; ++k) {
        const Piece& p = tile.pieces[k];
        const u64 first = std::max(p.stream_row, begin);
        const u64 last = std::min(p.stream_row + p.num_rows, begin + rows);
        if (first < last) emit(p, first - begin, first - p.stream_row, last - first);
    }
}

// Calls emit(src_local, begin, num_rows) for the sources of those rows: each one's are contiguous
// on a rail.
template <class Emit>
void for_each_source(const TilePieces& tile, u32 rail, u64 begin, u64 rows, const Emit& emit) {
    u32 source = ~0u;
    u64 first = 0, end = 0;
    for_each_part(tile, rail, begin, rows, [&](const Piece& p, u64 stream_row, u64, u64 num_rows) {
        if (p.src_local != source) {
            if (source != ~0u) emit(source, first, end - first);
            source = p.src_local;
            first = stream_row;
        }
        end = stream_row + num_rows;
    });
    if (source != ~0u) emit(source, first, end - first);
}

// The sender's side of a put: it starts when the receiver says so, direct: when its buffers are
// free.
void gate_put(TableBuilder* t, const ServerPut& s, u32 peer, Stream* stream);

// The receiver's side: lets `peer` start put `s`. Its credit is posted at kernel start, or when the
// previous put (`previous`, a stream, or kNoSlot) is nearly done; direct: all may start at once.
void let_send(TableBuilder* t, const ServerPut& s, u32 peer, u32 previous);

// This rank's part of each put, sent to the same-index peer: a stage with one stream, to which
// add_segments(put, rows) adds what it waits for.
template <class AddSegments>
void lower_puts(TableBuilder* t, const ServerPuts& puts, const AddSegments& add_segments) {
    for (const ServerPut& s : puts.puts) {
        const u64 rows = puts.part_rows[s.rail + t->local];
        if (!rows) continue;
        const u32 peer = s.other * t->num_local + t->local;
        t->begin_stage(kPut, s.put->ticks_begin, s.put->ticks_end, s.num_chunks);
        Stream& stream =
            t->add_stream(rows, s.chunk_rows, peer, t->flags.arrive(t->rank) + s.first_chunk);
        stream.source_row = puts.staging_row[s.rail + t->local];
        stream.target_row = s.remote_row;
        gate_put(t, s, peer, &stream);
        add_segments(s, rows);
        t->end_stage();
    }
}

// The same of puts that this rank receives; add_segments(put, rows) says where rows go.
template <class AddSegments>
void lower_receives(TableBuilder* t, const ServerPuts& puts, const AddSegments& add_segments) {
    u32 previous = kNoSlot;
    for (const ServerPut& s : puts.puts) {
        const u64 rows = puts.part_rows[s.rail + t->local];
        if (!rows) continue;
        const u32 peer = s.other * t->num_local + t->local;
        let_send(t, s, peer, previous);
        t->begin_stage(kReceive, s.put->ticks_begin, s.put->ticks_end, s.num_chunks);
        Stream& stream =
            t->add_stream(rows, s.chunk_rows, peer, t->flags.arrive(peer) + s.first_chunk);
        stream.source_row = puts.staging_row[s.rail + t->local];
        previous = t->last_stream();
        add_segments(s, rows);
        t->end_stage();
    }
}

}  // namespace fastkern
