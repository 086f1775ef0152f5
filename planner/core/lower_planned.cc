// Lowering of whole and split tiles: balanced rails, same-index peers, credits.
#include <algorithm>

#include "planner/core/lower.h"

namespace fastkern {

namespace {

// One put of this server, in or out, with what every rail of it needs to know.
struct ServerPut {
    const Put* put;
    u32 other;        // the other server
    u32 num_chunks;   // of the longest rail
    u32 first_chunk;  // chunks of earlier puts of the same pair
    u32 occurrence;   // puts of the pair on our rail so far, this one included; 0: none here
    u64 chunk_rows;
    u64 remote_row;    // out: first row in the peer's receive staging on this rail; in: in our own
    std::size_t rail;  // first of M entries in the arrays below
};

struct ServerPuts {
    std::vector<ServerPut> puts;
    std::vector<u64> part_begin, part_rows, staging_row;  // [put][rail]
};

void collect(const TableBuilder& t, bool out, ServerPuts* result) {
    const Plan& plan = t.plan;
    const u32 n = t.traffic.servers, m = t.num_local;
    std::vector<u32> parts(n, 0), chunks(n, 0), occurrences(n, 0);
    std::vector<u64> staged(m, 0), remote(n, 0);
    for (const Put& p : plan.order)
        if ((out ? p.sender : p.receiver) == t.server) ++parts[out ? p.receiver : p.sender];
    result->puts.reserve(n);
    for (const Put& p : plan.order) {
        const bool ours = (out ? p.sender : p.receiver) == t.server;
        const u64 here = ours || out ? plan.rail_part(p, t.local).second : 0;
        if (ours) {
            ServerPut s{};
            s.put = &p;
            s.other = out ? p.receiver : p.sender;
            s.rail = result->part_rows.size();
            u64 longest = 0;
            for (u32 l = 0; l < m; ++l) {
                const auto [begin, rows] = plan.rail_part(p, l);
                result->part_begin.push_back(begin);
                result->part_rows.push_back(rows);
                result->staging_row.push_back(staged[l]);
                staged[l] += rows;
                longest = std::max(longest, rows);
            }
            if (!longest) {  // a part so thin that it rounds to nothing on every rail
                result->part_begin.resize(s.rail);
                result->part_rows.resize(s.rail);
                result->staging_row.resize(s.rail);
                continue;
            }
            const u64 rail_rows = ceil_div(t.traffic.tile(p.sender, p.receiver), m);
            s.chunk_rows = t.chunk_rows(rail_rows, parts[s.other]);
            s.num_chunks = static_cast<u32>(ceil_div(longest, s.chunk_rows));
            s.first_chunk = chunks[s.other];
            chunks[s.other] += s.num_chunks;
            s.occurrence = here ? ++occurrences[s.other] : 0;
            s.remote_row = out ? remote[s.other] : result->staging_row[s.rail + t.local];
            result->puts.push_back(s);
        }
        if (out) remote[p.receiver] += here;
    }
}

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

void lower_pack(TableBuilder* t, const ServerPuts& out, const std::vector<TilePieces>& tiles) {
    for (const ServerPut& s : out.puts) {
        t->begin_stage(kPack, s.put->ticks_begin, s.put->ticks_end, s.num_chunks);
        for (u32 k = 0; k < t->num_local; ++k) {  // own rail first, then rotating
            const u32 rail = (t->local + k) % t->num_local;
            const u32 proxy = t->server * t->num_local + rail;
            Stream* stream = nullptr;
            for_each_part(
                tiles[s.other], rail, out.part_begin[s.rail + rail], out.part_rows[s.rail + rail],
                [&](const Piece& p, u64 stream_row, u64 offset, u64 num_rows) {
                    if (p.src_local != t->local) return;
                    if (!stream) {
                        stream = &t->add_stream(out.part_rows[s.rail + rail], s.chunk_rows, proxy,
                                                t->flags.pack(t->local, s.other) + s.first_chunk);
                        stream->target_row = out.staging_row[s.rail + rail];
                        if (proxy != t->rank) {
                            stream->gate_slot = t->flags.ready(proxy);
                            stream->gate_value = 1;
                        }
                    }
                    const u32 dst = s.other * t->num_local + p.dst_local;
                    t->add_segment(stream_row, t->input_row[dst] + p.pair_row + offset, num_rows);
                });
        }
        t->end_stage();
    }
}

void lower_put(TableBuilder* t, const ServerPuts& out, const std::vector<TilePieces>& tiles) {
    for (const ServerPut& s : out.puts) {
        const u64 rows = out.part_rows[s.rail + t->local];
        if (!rows) continue;
        const u32 peer = s.other * t->num_local + t->local;
        t->begin_stage(kPut, s.put->ticks_begin, s.put->ticks_end, s.num_chunks);
        Stream& stream =
            t->add_stream(rows, s.chunk_rows, peer, t->flags.arrive(t->rank) + s.first_chunk);
        stream.source_row = out.staging_row[s.rail + t->local];
        stream.target_row = s.remote_row;
        stream.gate_slot = t->flags.credit(peer);
        stream.gate_value = s.occurrence;
        u64 begin = 0, end = 0;  // the rows of one source are contiguous on a rail
        u32 source = t->num_local;
        const auto close = [&] {
            if (source == t->num_local) return;
            t->add_segment(begin, 0, end - begin, t->server * t->num_local + source,
                           t->flags.pack(source, s.other) + s.first_chunk);
        };
        for_each_part(tiles[s.other], t->local, out.part_begin[s.rail + t->local], rows,
                      [&](const Piece& p, u64 stream_row, u64, u64 num_rows) {
                          if (p.src_local != source) {
                              close();
                              source = p.src_local;
                              begin = stream_row;
                          }
                          end = stream_row + num_rows;
                      });
        close();
        t->end_stage();
    }
}

void lower_receive(TableBuilder* t, const ServerPuts& in, const std::vector<TilePieces>& tiles) {
    u32 previous = kNoSlot;
    std::vector<u8> touched(t->num_local);
    for (const ServerPut& s : in.puts) {
        const u64 rows = in.part_rows[s.rail + t->local];
        if (!rows) continue;
        const u32 peer = s.other * t->num_local + t->local;
        // The one sender of this moment: posted at kernel start, or when the previous one is nearly
        // done.
        if (previous == kNoSlot) {
            t->add_post(peer, t->flags.credit(t->rank), s.occurrence);
        } else {
            t->add_credit(previous, peer, s.occurrence);
        }
        t->begin_stage(kReceive, s.put->ticks_begin, s.put->ticks_end, s.num_chunks);
        Stream& stream =
            t->add_stream(rows, s.chunk_rows, peer, t->flags.arrive(peer) + s.first_chunk);
        stream.source_row = s.remote_row;
        previous = t->last_stream();
        std::fill(touched.begin(), touched.end(), u8{0});
        for_each_part(tiles[s.other], t->local, in.part_begin[s.rail + t->local], rows,
                      [&](const Piece& p, u64 stream_row, u64 offset, u64 num_rows) {
                          const u32 src = s.other * t->num_local + p.src_local;
                          touched[p.dst_local] = 1;
                          t->add_segment(stream_row,
                                         t->output_row_of(p.dst_local, src) + p.pair_row + offset,
                                         num_rows, t->server * t->num_local + p.dst_local);
                      });
        for (u32 k = 1; k < t->num_local; ++k) {
            const u32 d = (t->local + k) % t->num_local;
            const u32 dst = t->server * t->num_local + d;
            if (touched[d])
                t->add_link(dst, t->flags.land(t->local, s.other) + s.first_chunk,
                            t->flags.ready(dst));
        }
        t->end_stage();
    }
}

void lower_land(TableBuilder* t, const ServerPuts& in, const std::vector<TilePieces>& tiles) {
    for (const ServerPut& s : in.puts) {
        t->begin_stage(kLand, s.put->ticks_begin, s.put->ticks_end, s.num_chunks);
        for (u32 k = 1; k < t->num_local; ++k) {
            const u32 rail = (t->local + t->num_local - k) % t->num_local;
            bool open = false;
            for_each_part(
                tiles[s.other], rail, in.part_begin[s.rail + rail], in.part_rows[s.rail + rail],
                [&](const Piece& p, u64 stream_row, u64 offset, u64 num_rows) {
                    if (p.dst_local != t->local) return;
                    if (!open) {
                        t->add_stream(in.part_rows[s.rail + rail], s.chunk_rows,
                                      t->server * t->num_local + rail,
                                      t->flags.land(rail, s.other) + s.first_chunk);
                        open = true;
                    }
                    const u32 src = s.other * t->num_local + p.src_local;
                    t->add_segment(stream_row,
                                   t->output_row_of(t->local, src) + p.pair_row + offset, num_rows);
                });
        }
        t->end_stage();
    }
}

}  // namespace

std::vector<u8> lower_planned(const Plan& plan, u32 rank) {
    TableBuilder table(plan, rank);
    const u32 n = plan.traffic.servers, s = table.server;
    std::vector<TilePieces> out_tiles(n), in_tiles(n);
    for (u32 other = 0; other < n; ++other) {
        if (other == s) continue;
        balance_tile(plan.traffic, s, other, &out_tiles[other]);
        balance_tile(plan.traffic, other, s, &in_tiles[other]);
    }
    ServerPuts out, in;
    collect(table, true, &out);
    collect(table, false, &in);
    post_ready_to_local_peers(&table);
    lower_pack(&table, out, out_tiles);
    lower_push(&table);
    lower_put(&table, out, out_tiles);
    lower_receive(&table, in, in_tiles);
    lower_land(&table, in, in_tiles);
    lower_take(&table);
    return table.finish(plan.traffic.max_rail_out, plan.traffic.max_rail_in);
}

}  // namespace fastkern
