// Random dispatches and combines, and what they are by definition: plainly, for all ranks at once.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "kernels/body/args.h"
#include "kernels/body/number.h"
#include "planner/core/plan.h"

namespace fastkern {

using Random = std::mt19937_64;
using Bytes = std::vector<u8>;

constexpr u8 kUnwritten = 0xEE;

// A row of a rank's output. choice: the k of the expert layout; padding has no source.
struct OutputRow {
    static constexpr u32 kPadding = ~0u;
    u32 source;
    u64 token;
    u32 choice;
};

// Who chose what on all ranks, and the rows that follow.
struct Routing {
    Topology topology;
    u32 num_experts, topk, layout;
    u64 alignment;
    std::vector<u32> owner, local_index;  // [E]
    std::vector<std::vector<i64>> idx;    // [R][T * K]

    std::vector<std::vector<OutputRow>> rows;  // [R] each rank's output
    // [R][source][token * K + choice] row of the output there, rank layout: [token]; or kNone
    std::vector<std::vector<std::vector<u32>>> place;
    std::vector<i64> copies, to_server, to_rank;  // [R][E], [R][N], [R][R]

    u32 num_ranks() const { return topology.num_ranks(); }
    u64 num_tokens(u32 rank) const { return idx[rank].size() / topk; }
    i64 expert(u32 rank, u64 token, u32 k) const { return idx[rank][token * topk + k]; }
};

Routing make_routing(Random& random, const Topology& topology);

// What travels in a dispatch: tensors of these row sizes, and weights of 0, 4 or 8 bytes.
struct Payload {
    std::vector<u64> part_bytes, offsets;
    u64 weights_offset, header_offset, row_bytes;
    u32 weight_bytes;
    u32 salt;  // makes the bytes of each dispatch differ

    u8 byte(u32 rank, u64 part, u64 token, u64 column) const {  // part num_parts: the weights
        return static_cast<u8>(rank * 131 + part * 57 + token * 31 + column * 7 + salt * 17 + 1);
    }
    Bytes input(u64 part, u32 rank, u64 num_tokens, u64 bytes) const;
};

Payload make_payload(Random& random, u32 topk);

// One rank's side of a dispatch.
struct Received {
    std::vector<Bytes> parts;
    Bytes weights;
    std::vector<u64> index;  // rank layout
};

// An empty string, or what is wrong with what `rank` received.
std::string check_received(const Routing& routing, const Payload& payload, u32 rank,
                           const Received& received);

// What a combine sums; values of all ranks.
struct Sums {
    u64 width;
    u32 value_kind, wire_kind, bias_kind;
    bool weighted;
    u32 bias_rows;                  // 0: no bias; 1: one row for all tokens; 2: a row per token
    std::vector<Bytes> expert_out;  // [R] [rows, width]
    std::vector<Bytes> weights;     // [R] [rows]
    std::vector<Bytes> bias;        // [R]

    bool wide() const { return value_kind == kFloat64; }  // sums are double
    u64 row_bytes() const { return round_up(width * value_bytes(wire_kind)); }
    u64 partial_row_bytes() const { return round_up(width * (wide() ? 8 : 4)); }
    u64 bias_stride() const { return bias_rows == 2 ? width * value_bytes(bias_kind) : 0; }

  private:
    static u64 round_up(u64 bytes) { return bytes < 16 ? 16 : (bytes + 15) / 16 * 16; }
};

Sums make_sums(Random& random, const Routing& routing);

// An empty string, or what is wrong with the sums of `rank`'s tokens.
std::string check_result(const Routing& routing, const Sums& sums, u32 rank, const Bytes& result);

}  // namespace fastkern
