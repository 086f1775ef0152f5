// Lowering of planned puts between same-index peers: balanced rails and credits (whole and split
// tiles), or, for a dispatch, also unbalanced ones (direct, spreadout).
#include "planner/core/server_puts.h"

namespace fastkern {

namespace {

void lower_pack(TableBuilder* t, const ServerPuts& out, const Vector<TilePieces>& tiles) {
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

void lower_put(TableBuilder* t, const ServerPuts& out, const Vector<TilePieces>& tiles) {
    lower_puts(t, out, [&](const ServerPut& s, u64 rows) {
        for_each_source(tiles[s.other], t->local, out.part_begin[s.rail + t->local], rows,
                        [&](u32 src_local, u64 begin, u64 num_rows) {
                            t->add_segment(begin, 0, num_rows, t->server * t->num_local + src_local,
                                           t->flags.pack(src_local, s.other) + s.first_chunk);
                        });
    });
}

// The destinations of a put's rows, by arithmetic.
void link_destinations(TableBuilder* t, const ServerPut& s, const ServerPuts& in,
                       const Vector<TilePieces>& tiles) {
    Vector<u8> touched(t->num_local, u8{0});
    for_each_part(
        tiles[s.other], t->local, in.part_begin[s.rail + t->local], in.part_rows[s.rail + t->local],
        [&](const Piece& p, u64 stream_row, u64 offset, u64 num_rows) {
            const u32 src = s.other * t->num_local + p.src_local;
            touched[p.dst_local] = 1;
            t->add_segment(stream_row, t->output_row_of(p.dst_local, src) + p.pair_row + offset,
                           num_rows, t->server * t->num_local + p.dst_local);
        });
    for (u32 k = 1; k < t->num_local; ++k) {
        const u32 d = (t->local + k) % t->num_local;
        const u32 dst = t->server * t->num_local + d;
        if (touched[d])
            t->add_link(dst, t->flags.land(t->local, s.other) + s.first_chunk, t->flags.ready(dst));
    }
}

// Dispatch: headers say where rows go, so that any chunk may touch any rank. Segments tell sources
// apart.
void link_all(TableBuilder* t, const ServerPut& s, const ServerPuts& in,
              const Vector<TilePieces>& tiles) {
    for_each_source(tiles[s.other], t->local, in.part_begin[s.rail + t->local],
                    in.part_rows[s.rail + t->local], [&](u32 src_local, u64 begin, u64 rows) {
                        t->add_segment(begin, 0, rows, s.other * t->num_local + src_local);
                    });
    for (u32 k = 1; k < t->num_local; ++k) {
        const u32 dst = t->server * t->num_local + (t->local + k) % t->num_local;
        t->add_link(dst, t->flags.land(t->local, s.other) + s.first_chunk, t->flags.ready(dst));
    }
}

void lower_receive(TableBuilder* t, const ServerPuts& in, const Vector<TilePieces>& tiles) {
    lower_receives(t, in, [&](const ServerPut& s, u64) {
        if (t->plan.moe())
            link_all(t, s, in, tiles);
        else
            link_destinations(t, s, in, tiles);
    });
}

// Dispatch: what a proxy has for us of a chunk is told by its Arrival records.
void land_any(TableBuilder* t, const ServerPut& s, const ServerPuts& in, u32 rail) {
    const u64 rows = in.part_rows[s.rail + rail];
    if (!rows) return;
    t->add_stream(rows, s.chunk_rows, t->server * t->num_local + rail,
                  t->flags.land(rail, s.other) + s.first_chunk);
    t->add_segment(0, 0, rows);
}

void lower_land(TableBuilder* t, const ServerPuts& in, const Vector<TilePieces>& tiles) {
    for (const ServerPut& s : in.puts) {
        t->begin_stage(kLand, s.put->ticks_begin, s.put->ticks_end, s.num_chunks);
        for (u32 k = 1; k < t->num_local; ++k) {
            const u32 rail = (t->local + t->num_local - k) % t->num_local;
            if (t->plan.moe()) {
                land_any(t, s, in, rail);
                continue;
            }
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

Vector<u8> lower_planned(const Plan& plan, u32 rank) {
    TableBuilder table(plan, rank);
    const u32 m = plan.traffic.gpus_per_server;
    if (plan.moe())
        table.reserve(most_records_of_dispatch(plan.traffic.servers, m));
    else
        table.reserve(usual_records(plan.traffic.servers, m));
    const u32 n = plan.traffic.servers, s = table.server;
    Vector<TilePieces> out_tiles(n), in_tiles(n);
    BalanceScratch scratch;
    for (u32 other = 0; other < n; ++other) {
        if (other == s) continue;
        balance_tile(plan.traffic, s, other, &scratch, &out_tiles[other]);
        balance_tile(plan.traffic, other, s, &scratch, &in_tiles[other]);
    }
    ServerPuts out, in;
    collect_puts(table, true, &out);
    collect_puts(table, false, &in);
    post_ready_to_local_peers(&table);
    lower_pack(&table, out, out_tiles);
    lower_push(&table);
    lower_put(&table, out, out_tiles);
    lower_receive(&table, in, in_tiles);
    lower_land(&table, in, in_tiles);
    lower_take(&table);
    const auto [send_rows, receive_rows] = plan.staging_rows();
    return table.finish(send_rows, receive_rows);
}

}  // namespace fastkern
