// Route on the host target: the body's passes, a unit at a time.
#pragma once

#include <vector>

#include "kernels/target/host.h"
//
#include "kernels/body/route.h"

namespace fastkern {

// What a rank routes by; owner and local_index have an entry per expert.
struct RouteInput {
    const u8* topk_idx;
    u32 idx_bytes;  // 4 or 8
    u64 num_tokens;
    u32 topk;
    std::vector<u32> owner, local_index;
    u32 servers, gpus_per_server, rank, num_units;
};

// First rows, see RouteArgs.
struct RouteBases {
    std::vector<u64> slot, window, list, returned, partial;
};

class HostRoute {
  public:
    // Counts and scans. Throws std::invalid_argument when the sizes are out of range.
    explicit HostRoute(RouteInput input);

    const std::vector<u64>& totals() const { return totals_; }  // [E] copies, [N], [R] tokens
    // Position in topk_idx of the first index that is neither -1 nor an expert; ~0: none.
    u64 bad() const { return bad_.back(); }

    // Fills pack_list, entries and token_map of a handle whose header is complete; once.
    void fill(u8* handle, const RouteBases& bases, u32 layout);

  private:
    RouteInput input_;
    RouteArgs args_{};
    std::vector<u64> counts_, totals_, bad_;
    bool filled_ = false;
};

}  // namespace fastkern
