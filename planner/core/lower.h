// Building one rank's stage table: the records, and the two ways to fill them.
#pragma once

#include <vector>

#include "planner/core/balance.h"
#include "planner/core/plan.h"

namespace fastkern {

// Collects the records of a table; stages are added queue by queue, in order.
class TableBuilder {
  public:
    TableBuilder(const Plan& plan, u32 rank);

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

    std::vector<u8> finish(u64 send_rows, u64 receive_rows);

    const Plan& plan;
    const Traffic& traffic;
    const u32 rank, server, local, num_local;
    const FlagLayout flags;
    std::vector<u64> input_row;   // [R] first row for each destination in this rank's input
    std::vector<u64> output_row;  // [M][R] first row of each source in the outputs of this server

    u64 output_row_of(u32 dst_local, u32 src) const {
        return output_row[static_cast<std::size_t>(dst_local) * traffic.num_ranks + src];
    }
    // Chunk size for streams of up to `num_rows` rows cut into `parts` puts: about chunk_bytes,
    // larger where the chunk flags of a pair would not suffice.
    u64 chunk_rows(u64 num_rows, u64 parts) const;
    // Ticks of a put at a scale that keeps them small.
    u64 scaled(u64 rows, u64 total, u64 least) const;

  private:
    QueueKind queue_ = kPack;
    Queue queues_[kNumQueues] = {};
    std::vector<Post> posts_;
    std::vector<Stage> stages_;
    std::vector<Stream> streams_;
    std::vector<Segment> segments_;
    std::vector<Link> links_;
};

// The rows that stay inside the server: push and take. Same for every policy.
void lower_push(TableBuilder* table);
void lower_take(TableBuilder* table);

// Ready posts to the local peers.
void post_ready_to_local_peers(TableBuilder* table);

std::vector<u8> lower_planned(const Plan& plan, u32 rank);  // whole, split
std::vector<u8> lower_shifted(const Plan& plan, u32 rank);  // direct, spreadout

}  // namespace fastkern
