// What a launch is given: plain records shared by the host and every device.
#pragma once

#include "kernels/body/handle.h"

namespace fastkern {

// Scale-up: a rank of the same server. Scale-out: a put.
enum Tier : u32 { kScaleUp, kScaleOut, kNumTiers };

// Rates of the shaped transport, picoseconds per KiB and rank; 0: unlimited.
struct ShapedRates {
    u64 ps_per_kib[kNumTiers];
};

enum RecordState : u32 { kNoRecord, kRecordInWork, kRecordWritten };

// The first wait of a rank that ran out of time. `state` is written last, with release.
struct ErrorRecord {
    u64 expected;  // flag value awaited: epoch << kValueBits | value
    u64 seen;      // flag value found
    u64 waited_ns;
    u64 epoch;
    u32 queue;  // QueueKind of the item that could not run; kNumQueues: own puts did not end
    u32 stage;  // index within its queue
    u32 chunk;
    u32 peer;  // the rank whose flag is missing
    u32 slot;  // the flag
    u32 reserved;
    u64 state;  // RecordState
};
static_assert(sizeof(ErrorRecord) == 64, "layout");

// The words of one rank's heap that its blocks and its peers share, besides the flags.
struct Control {
    u64 abort;  // 0, or epoch << kValueBits | origin + 1, written by any rank
    u64 epoch;  // calls completed here; advanced by the last block out
    u64 tickets[kNumQueues];
    u64 blocks_out;
    u64 egress_free_ns[kNumTiers];  // shaped transport: when this rank's links fall idle
    u64 ingress_free_ns[kNumTiers];
    ErrorRecord record;
    u64 reserved;
};
static_assert(sizeof(Control) == 192, "layout");

// What a block did, for traces: one item from begin to end.
struct TraceEvent {
    u64 begin_ns;
    u64 end_ns;
    u64 bytes;
    u32 queue;
    u32 stage;
    u32 chunk;
    u32 peer;
    u32 block;
    u32 reserved;
};
static_assert(sizeof(TraceEvent) == 48, "layout");

// One tensor of a dispatch: a row's part from it lies at `offset` in the row that moves.
struct PayloadPart {
    const u8* input;  // [T, row_bytes]
    u8* output;       // [num_recv_rows, row_bytes]
    u64 row_bytes;
    u64 offset;  // a multiple of 16
};
static_assert(sizeof(PayloadPart) == 32, "layout");

constexpr u32 kMostParts = 8;

// What dispatch and combine need beside the table.
struct MoeArgs {
    u8* handle;  // see handle.h
    // Dispatch.
    PayloadPart parts[kMostParts];
    const u8* weights_input;  // [T, K]
    u8* weights_output;       // expert layout: [num_recv_rows]; rank layout: [num_recv_rows, K]
    u64* index_output;        // rank layout: [num_recv_rows, K], int64, -1: not here
    u64 weights_offset;       // in the row
    u64 header_offset;
    u32 num_parts;
    u32 weight_bytes;  // of one; 0: none travel
    u32 record;        // 1: fill the handle; 0: it has been filled
    u32 reserved;
    // Combine. Weights are of the sums' type, float or double.
    const u8* expert_out;   // [num_recv_rows, width]
    const u8* row_weights;  // [num_recv_rows], or null
    const u8* bias;         // null, or rows `bias_stride` bytes apart (0: one row for all tokens)
    u8* result;             // [T, width]
    u64 width;
    u64 bias_stride;
    u32 value_kind;  // of expert_out and result
    u32 wire_kind;   // between servers
    u32 bias_kind;
    u32 reserved2;
};
static_assert(sizeof(MoeArgs) == 384, "layout");

struct KernelArgs {
    const u8* table;           // this rank's stage table
    const u8* input;           // [input_rows, row_bytes]
    u8* output;                // [output_rows, row_bytes]
    Control* const* controls;  // [R] as mapped here
    u64* const* flags;         // [R] FlagLayout words of each rank
    u64* const* visible_ns;    // [R] shaped transport: when a flag may be seen; else null
    u8* const* data;           // [R] DataLayout bytes of each rank
    const MoeArgs* moe;        // dispatch, combine
    u64 epoch;                 // of this call, from 1
    u64 progress_ns;           // deadline without progress
    TraceEvent* trace;         // null: no trace
    u64* trace_count;          // events so far; those past the capacity are dropped
    u64 trace_capacity;
    u32 num_blocks;
    u32 rank;
};
static_assert(sizeof(KernelArgs) == 112, "layout");

}  // namespace fastkern
