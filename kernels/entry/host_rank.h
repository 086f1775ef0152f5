// One rank's side of the host runtime: records, growth, launches. Blocking calls; no Python inside.
#pragma once

#include <string>
#include <vector>

#include "kernels/entry/host_heap.h"
#include "kernels/entry/host_launch.h"

namespace fastkern {

// A POSIX shared memory object, mapped. Owner-only; its memory is reserved when it is created, so
// that running out is an error here and not a signal later.
class SharedMemory {
  public:
    // Throws std::system_error. With `create`, the name must not exist yet.
    SharedMemory(const std::string& name, u64 bytes, bool create);
    ~SharedMemory();
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    void unlink();  // the name goes, mappings stay; a second call does nothing
    u8* base() const { return base_; }
    u64 bytes() const { return bytes_; }

  private:
    std::string name_;
    u8* base_ = nullptr;
    u64 bytes_ = 0;
    bool linked_ = false;
};

enum class Outcome : u32 { kDone, kTimeout, kAborted };

class HostRank {
  public:
    HostRank(u32 rank, const ControlLayout& layout, u8* control_base);

    // Count exchange: writes this rank's record (up to layout.record_bytes) into every rank's heap,
    // then waits until all records of this epoch are here. `slice_ns` bounds one call; call again
    // to go on waiting.
    void post_record(u64 epoch, const u8* payload, u64 bytes);
    Outcome await_records(u64 epoch, u64 slice_ns);
    std::vector<u32> missing_records(u64 epoch) const;
    const u8* record(u64 epoch, u32 writer) const;

    // Growth. Rank 0 announces; the others wait for it, map, and acknowledge to rank 0.
    void announce(u64 generation, const std::string& name, u64 bytes_per_rank, u32 status);
    Outcome await_mailbox(u64 generation, u64 slice_ns);
    const Mailbox& mailbox() const;
    void acknowledge(u64 generation);
    Outcome await_acks(u64 generation, u64 slice_ns);
    std::vector<u32> missing_acks(u64 generation) const;
    void map_data(u8* base, u64 bytes_per_rank);

    // moe: of a dispatch or combine, else null.
    bool launch(const u8* table, const u8* input, u8* output, const MoeArgs* moe, u64 epoch,
                u64 progress_ns, const LaunchOptions& options);

    // From the next launch on, keep events, up to `capacity` in all; no launch may be under way.
    void start_trace(u64 capacity);
    std::vector<TraceEvent> stop_trace();             // those that were kept, unordered
    u64 trace_count() const { return trace_count_; }  // since the start, kept or not

    u64 abort_word() const;
    void abort_all(u64 epoch);  // tells every rank to leave; the first origin stays
    const ErrorRecord& error(u32 origin) const;  // of the rank that gave up
    u64 completed_epoch() const;

  private:
    u8* region(u32 r) const { return control_base_ + r * layout_.bytes(); }
    u64* word(u32 r, u64 offset) const { return reinterpret_cast<u64*>(region(r) + offset); }
    template <class Ready>
    Outcome wait(u64 slice_ns, const Ready& ready) const;

    u32 rank_;
    ControlLayout layout_;
    u8* control_base_;
    HeapView heap_;
    std::vector<TraceEvent> trace_;
    u64 trace_count_ = 0;
};

}  // namespace fastkern
