// Building one rank's stage table: the records, and the two ways to fill them.
#pragma once

#include "planner/core/balance.h"
#include "planner/core/plan.h"
#include "planner/core/table_room.h"

namespace fastkern {

// Collects the records of a table; stages are added queue by queue, in order.
class TableBuilder {
  public:
    TableBuilder(const Plan& plan, u32 rank);

    void reserve(const RecordCounts& counts);

    // Opens the next stage of `queue`; its streams follow.
    void begin_stage(QueueKind queue, u64 ticks_begin, u64 ticks_end, u32 num_chunks);
    Stream& add_stream(u64 num_rows, u64 chunk_rows, u32 peer, u32 slot);
    void add_segment(u64 stream_row, u64 row, u64 num_rows, u32 peer = 0, u32 slot = 0);
    void add_link(u32 rank, u32 slot, u32 gate_slot);
    // The sender after `stream` gets its credit when that stream is nearly done, `credit_lead`
    // chunks early.
    void add_credit(u32 stream, u32 next_sender, u32 value);
    u32 last_stream() const { return static_cast<u32>(streams_.size()) - 1; }
    void end_stage();  // a stage without streams is dropped
    void add_post(u32 rank, u32 slot, u32 value);

    // The table's bytes. The header's sizes of staging are the most that any rank needs.
    Vector<u8> finish(u64 send_rows, u64 receive_rows);
    Vector<u8> finish_combine(u64 send_rows, u64 receive_rows, const CombineShape& shape);

    const Plan& plan;
    const Traffic& traffic;
    const u32 rank, server, local, num_local;
    const FlagLayout flags;
    Vector<u64> input_row;   // [R] first row for each destination in this rank's input
    Vector<u64> output_row;  // [M][R] first row of each source in the outputs of this server,
                             // dispatch: in its windows

    u64 output_row_of(u32 dst_local, u32 src) const {
        return output_row[static_cast<std::size_t>(dst_local) * traffic.num_ranks + src];
    }
    // Chunk size for streams of up to `num_rows` rows cut into `parts` puts: about chunk_bytes,
    // larger where the chunk flags of a pair would not suffice.
    u64 chunk_rows(u64 num_rows, u64 parts) const;
    // Ticks of a put at a scale that keeps them small.
    u64 scaled(u64 rows, u64 total, u64 least) const;

    // Rows from `src` to local rank `dst_local`, as they lie in its output, dispatch: its window.
    u64 rows_to(u32 src, u32 dst_local) const {
        const std::size_t at =
            std::size_t{src} * traffic.num_ranks + server * num_local + dst_local;
        return plan.moe() ? plan.to_rank[at] : traffic.rows[at];
    }

  private:
    Header make_header(u64 send_rows, u64 receive_rows) const;
    Vector<u8> pack(Header header) const;

    QueueKind queue_ = kPack;
    Queue queues_[kNumQueues] = {};
    Vector<Post> posts_;
    Vector<Stage> stages_;
    Vector<Stream> streams_;
    Vector<Segment> segments_;
    Vector<Link> links_;
};

// Rows between ranks of one server: one stage, whose chunks all ranks of the server count alike.
struct LocalStage {
    u64 chunk_rows = 0;
    u64 ticks = 0;
    u32 num_chunks = 0;
};
LocalStage local_stage(const TableBuilder& table);

// The rows that stay inside the server: push and take. Same for every policy.
void lower_push(TableBuilder* table);
void lower_take(TableBuilder* table);

// Ready posts to the local peers.
void post_ready_to_local_peers(TableBuilder* table);

Vector<u8> lower_planned(const Plan& plan, u32 rank);  // whole, split; dispatch: all
Vector<u8> lower_shifted(const Plan& plan, u32 rank);  // direct, spreadout

}  // namespace fastkern
