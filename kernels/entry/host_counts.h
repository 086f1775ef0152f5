// The counts of all ranks that a dispatch goes by, checked, and where the rows of one rank begin:
// what fastkern/moe/counts.py and sizes.py do in Python, without the heap.
#pragma once

#include <vector>

#include "kernels/body/handle.h"

namespace fastkern {

// How tokens are routed; the same for every call, and but for `rank` on every rank.
struct RoutingShape {
    u32 servers = 1, gpus_per_server = 1, rank = 0;
    u64 num_max_tokens = 1;        // C, the most of any rank
    u32 topk = 0;                  // K
    std::vector<u32> owner;        // [E] rank of each expert
    std::vector<u32> local_index;  // [E] its place among its rank's, which go by id
    u32 layout = kExpertLayout;
    u64 alignment = 1;  // rows of an expert are padded to a multiple of it

    u32 num_ranks() const { return servers * gpus_per_server; }
    u64 num_experts() const { return owner.size(); }
    // Words of a rank's counts: [E] copies for each expert, [N] distinct tokens for each server,
    // [R] for each rank.
    u64 count_words() const { return num_experts() + servers + num_ranks(); }
};

// Where first rows are written, see RouteArgs.
struct FirstRowArrays {
    u64* slot;               // [E]
    u64* window;             // [R]
    u64* list;               // [R]
    u64* returned;           // [N]
    u64* partial;            // [M]
    u64* tokens_per_expert;  // [own experts]
};

// Why a call was refused.
struct RefusalText {
    char text[256] = "";
};

// For one thread at a time.
class HostCounts {
  public:
    // Throws std::invalid_argument naming the field.
    explicit HostCounts(RoutingShape shape);

    const RoutingShape& shape() const { return shape_; }
    u64 num_own_experts() const { return experts_of(shape_.rank); }

    // Takes the counts [R][E + N + R] of all ranks and this rank's number of tokens. False with the
    // reason where they cannot be, or where some rank has not the room. But for what is said of
    // `num_tokens` all ranks decide alike.
    //
    // Where it is true, no rank needs more than fastkern/moe/buffers.py says for C and K: a rank's
    // tokens for servers and ranks are no more than its C K choices.
    bool take(const u64* counts, u64 num_tokens, RefusalText* why);

    // Of the counts taken last.
    void write_first_rows(const FirstRowArrays& out) const;

    const u64* copies(u32 rank) const { return counts_ + rank * shape_.count_words(); }
    const u64* to_server(u32 rank) const { return copies(rank) + shape_.num_experts(); }
    const u64* to_rank(u32 rank) const { return to_server(rank) + shape_.servers; }

  private:
    u64 experts_of(u32 rank) const { return first_expert_[rank + 1] - first_expert_[rank]; }
    bool take_rank(u32 source, RefusalText* why) const;
    bool take_rows(RefusalText* why);

    RoutingShape shape_;
    std::vector<u32> by_rank_;       // [E] experts, rank after rank, by id
    std::vector<u64> first_expert_;  // [R + 1] of each rank in by_rank_
    std::vector<u64> room_;          // [R] output rows that num_max_tokens promises each rank
    const u64* counts_ = nullptr;
    std::vector<u64> per_expert_;  // [E] copies of all ranks
    std::vector<u64> before_;      // [E] of the ranks before this one
    std::vector<u64> begin_;       // [E] first row on the expert's rank
};

}  // namespace fastkern
