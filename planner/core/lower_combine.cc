// Lowering of a combine: the dispatch's plan transposed. What a rank sent it now receives, on the
// same rails and in the same order; staging rows and chunks are those of the dispatch.
//
//   dispatch            combine
//   land at rank d      pack: d's sums of its slots -> partial rows of the proxy
//   receive             sum: the proxy adds its server's partial rows into send staging
//   put a -> b          put b -> a
//   pack                receive: the proxy of server a hands rows to their owners' windows
//   push, take          push: partial rows straight to an owner of the same server
//                       reduce: the owner adds servers' sums into its output
#include "planner/core/server_puts.h"

namespace fastkern {

namespace {

// A dispatch's put a -> own server: our sums for each proxy, and the proxy's for the put back.
void lower_pack(TableBuilder* t, const ServerPuts& in) {
    for (const ServerPut& s : in.puts) {
        t->begin_stage(kPack, s.put->ticks_begin, s.put->ticks_end, s.num_chunks);
        for (u32 k = 1; k < t->num_local; ++k) {
            const u32 rail = (t->local + k) % t->num_local;
            const u64 rows = in.part_rows[s.rail + rail];
            if (!rows) continue;
            const u32 proxy = t->server * t->num_local + rail;
            Stream& stream = t->add_stream(rows, s.chunk_rows, proxy,
                                           t->flags.pack(t->local, s.other) + s.first_chunk);
            stream.gate_slot = t->flags.ready(proxy);
            stream.gate_value = 1;
            t->add_segment(0, t->flags.arrival(t->flags.land(rail, s.other) + s.first_chunk), rows);
        }
        t->end_stage();
    }
}

// Our sums for tokens of this server, to their owners.
void lower_push_to_owners(TableBuilder* t) {
    const LocalStage s = local_stage(*t);
    if (!s.num_chunks) return;
    t->begin_stage(kPush, 0, s.ticks, s.num_chunks);
    for (u32 k = 1; k < t->num_local; ++k) {
        const u32 j = (t->local + k) % t->num_local;
        const u32 owner = t->server * t->num_local + j;
        const u64 rows = t->traffic.at(owner, t->rank);
        if (!rows) continue;
        Stream& stream = t->add_stream(rows, s.chunk_rows, owner, t->flags.push(t->local));
        for (u32 d = 0; d < t->local; ++d)  // partial rows of an owner lie by contributor
            if (d != j) stream.target_row += t->traffic.at(owner, t->server * t->num_local + d);
        stream.gate_slot = t->flags.ready(owner);
        stream.gate_value = 1;
        t->add_segment(0, t->output_row_of(t->local, owner), rows);
    }
    t->end_stage();
}

void lower_put_back(TableBuilder* t, const ServerPuts& in) {
    lower_puts(t, in, [&](const ServerPut& s, u64 rows) {
        t->add_segment(0, 0, rows, t->rank, t->flags.sum(s.other) + s.first_chunk);
    });
}

void lower_receive_back(TableBuilder* t, const ServerPuts& out, const Vector<TilePieces>& tiles) {
    Vector<u8> touched;
    lower_receives(t, out, [&](const ServerPut& s, u64 rows) {
        touched.assign(t->num_local, u8{0});
        for_each_part(tiles[s.other], t->local, out.part_begin[s.rail + t->local], rows,
                      [&](const Piece& p, u64 stream_row, u64 offset, u64 num_rows) {
                          const u32 owner = t->server * t->num_local + p.src_local;
                          u64 base = 0;  // an owner's window lies by server
                          for (u32 b = 0; b < s.other; ++b)
                              if (b != t->server)
                                  base += t->traffic.at(owner, b * t->num_local + p.src_local);
                          touched[p.src_local] = 1;
                          t->add_segment(stream_row, base + p.pair_row + offset, num_rows, owner);
                      });
        for (u32 k = 1; k <= t->num_local; ++k) {  // ourselves too: reduce waits for it
            const u32 d = (t->local + k) % t->num_local;
            const u32 owner = t->server * t->num_local + d;
            if (touched[d])
                t->add_link(owner, t->flags.land(t->local, s.other) + s.first_chunk,
                            d == t->local ? kNoSlot : t->flags.ready(owner));
        }
    });
}

void lower_land_back(TableBuilder* t, const ServerPuts& out, const Vector<TilePieces>& tiles) {
    for (const ServerPut& s : out.puts) {
        t->begin_stage(kLand, s.put->ticks_begin, s.put->ticks_end, s.num_chunks);
        for (u32 k = 1; k <= t->num_local; ++k) {
            const u32 rail = (t->local + t->num_local - k) % t->num_local;
            bool open = false;
            for_each_part(tiles[s.other], rail, out.part_begin[s.rail + rail],
                          out.part_rows[s.rail + rail],
                          [&](const Piece& p, u64 stream_row, u64, u64 num_rows) {
                              if (p.src_local != t->local) return;
                              if (!open)
                                  t->add_stream(out.part_rows[s.rail + rail], s.chunk_rows,
                                                t->server * t->num_local + rail,
                                                t->flags.land(rail, s.other) + s.first_chunk);
                              open = true;
                              t->add_segment(stream_row, 0, num_rows);
                          });
        }
        t->end_stage();
    }
}

void lower_take_partials(TableBuilder* t) {
    const LocalStage s = local_stage(*t);
    if (!s.num_chunks) return;
    t->begin_stage(kTake, 0, s.ticks, s.num_chunks);
    for (u32 k = 1; k < t->num_local; ++k) {
        const u32 d = (t->local + t->num_local - k) % t->num_local;
        const u32 rank = t->server * t->num_local + d;
        const u64 rows = t->traffic.at(t->rank, rank);
        if (!rows) continue;
        t->add_stream(rows, s.chunk_rows, rank, t->flags.push(d));
        t->add_segment(0, 0, rows);
    }
    t->end_stage();
}

void lower_sum(TableBuilder* t, const ServerPuts& in) {
    for (const ServerPut& s : in.puts) {
        const u64 rows = in.part_rows[s.rail + t->local];
        if (!rows) continue;
        t->begin_stage(kSum, s.put->ticks_begin, s.put->ticks_end, s.num_chunks);
        Stream& stream =
            t->add_stream(rows, s.chunk_rows, t->rank, t->flags.sum(s.other) + s.first_chunk);
        stream.source_row = stream.target_row = in.staging_row[s.rail + t->local];
        t->add_segment(0, 0, rows);
        for (u32 k = 1; k < t->num_local; ++k) {
            const u32 d = (t->local + k) % t->num_local;
            t->add_link(t->server * t->num_local + d, t->flags.pack(d, s.other) + s.first_chunk,
                        kNoSlot);
        }
        t->end_stage();
    }
}

void lower_reduce(TableBuilder* t, const CombineShape& shape) {
    if (!shape.num_tokens) return;
    u64 after = local_stage(*t).ticks;
    for (const Put& p : t->plan.order) after = std::max(after, p.ticks_end);
    const u64 chunk_rows = std::max<u64>(
        1, std::max(t->plan.options.chunk_bytes / shape.row_bytes, shape.num_tokens >> 20));
    const u32 num_chunks = static_cast<u32>(ceil_div(shape.num_tokens, chunk_rows));
    t->begin_stage(kReduce, after + 1, after + 1 + num_chunks, num_chunks);
    t->add_stream(shape.num_tokens, chunk_rows, t->rank, kNoSlot);
    t->add_segment(0, 0, shape.num_tokens);
    t->end_stage();
}

}  // namespace

Vector<u8> lower_combine(const Plan& plan, u32 rank, const CombineShape& shape) {
    TableBuilder table(plan, rank);
    const u32 n = plan.traffic.servers;
    table.reserve(most_records_of_combine(n, plan.traffic.gpus_per_server));
    Vector<TilePieces> tiles(n);
    BalanceScratch scratch;
    for (u32 other = 0; other < n; ++other)
        if (other != table.server)
            balance_tile(plan.traffic, table.server, other, &scratch, &tiles[other]);
    ServerPuts out, in;
    collect_puts(table, true, &out);
    collect_puts(table, false, &in);
    post_ready_to_local_peers(&table);
    lower_pack(&table, in);
    lower_push_to_owners(&table);
    lower_put_back(&table, in);
    lower_receive_back(&table, out, tiles);
    lower_land_back(&table, out, tiles);
    lower_take_partials(&table);
    lower_sum(&table, in);
    lower_reduce(&table, shape);
    const auto [send_rows, receive_rows] = plan.staging_rows();
    return table.finish_combine(receive_rows, send_rows, shape);
}

}  // namespace fastkern
