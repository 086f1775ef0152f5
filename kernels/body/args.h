// What a launch is given: plain records shared by the host and every device.
#pragma once

#include "planner/stage_table.h"

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
    u64 reserved[3];
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

struct KernelArgs {
    const u8* table;           // this rank's stage table
    const u8* input;           // [input_rows, row_bytes]
    u8* output;                // [output_rows, row_bytes]
    Control* const* controls;  // [R] as mapped here
    u64* const* flags;         // [R] FlagLayout words of each rank
    u64* const* visible_ns;    // [R] shaped transport: when a flag may be seen; else null
    u8* const* data;           // [R] DataLayout bytes of each rank
    u64 epoch;                 // of this call, from 1
    u64 progress_ns;           // deadline without progress
    TraceEvent* trace;         // null: no trace
    u64* trace_count;          // events so far; those past the capacity are dropped
    u64 trace_capacity;
    u32 num_blocks;
    u32 rank;
};
static_assert(sizeof(KernelArgs) == 104, "layout");

}  // namespace fastkern
