#include "kernels/entry/host_route.h"

#include <stdexcept>

namespace fastkern {

HostRoute::HostRoute(RouteInput input) : input_(std::move(input)) {
    const RouteInput& in = input_;
    if (in.topk > kMostChoices) throw std::invalid_argument("top-k is at most 32");
    if (in.idx_bytes != 4 && in.idx_bytes != 8)
        throw std::invalid_argument("indices have 4 or 8 bytes");
    if (in.owner.size() != in.local_index.size() || in.owner.empty())
        throw std::invalid_argument("owner and local_index have an entry per expert");
    if (in.num_units < 1 || in.num_units > 4096)
        throw std::invalid_argument("num_units must be 1 to 4096");
    if (in.num_tokens * (in.topk ? in.topk : 1) >= kNone)
        throw std::invalid_argument("more than 2^32 - 2 choices on a rank");
    args_.topk_idx = in.topk_idx;
    args_.num_tokens = in.num_tokens;
    args_.owner = in.owner.data();
    args_.local_index = in.local_index.data();
    args_.idx_bytes = in.idx_bytes;
    args_.topk = in.topk;
    args_.num_experts = static_cast<u32>(in.owner.size());
    args_.num_ranks = in.servers * in.gpus_per_server;
    args_.servers = in.servers;
    args_.gpus_per_server = in.gpus_per_server;
    args_.rank = in.rank;
    args_.num_units = in.num_units;
    for (const u32 rank : in.owner)
        if (rank >= args_.num_ranks) throw std::invalid_argument("an owner is not a rank");
    counts_.resize(in.num_units * route_keys(args_));
    totals_.resize(route_keys(args_));
    bad_.resize(in.num_units + 1);
    args_.counts = counts_.data();
    args_.totals = totals_.data();
    args_.bad = bad_.data();
    for (u32 unit = 0; unit < in.num_units; ++unit) route_count(args_, unit);
    for (u64 key = 0; key < route_keys(args_); ++key) route_scan(args_, key);
}

void HostRoute::fill(u8* handle, const RouteBases& bases, u32 layout) {
    if (filled_) throw std::invalid_argument("the places of this route have been given out");
    if (bases.slot.size() != args_.num_experts || bases.window.size() != args_.num_ranks ||
        bases.list.size() != args_.num_ranks || bases.returned.size() != args_.servers ||
        bases.partial.size() != args_.gpus_per_server)
        throw std::invalid_argument("bases of the wrong size");
    filled_ = true;
    args_.handle = handle;
    args_.slot_base = bases.slot.data();
    args_.window_base = bases.window.data();
    args_.list_base = bases.list.data();
    args_.return_base = bases.returned.data();
    args_.partial_base = bases.partial.data();
    args_.layout = layout;
    for (u32 unit = 0; unit < args_.num_units; ++unit) route_fill(args_, unit);
}

}  // namespace fastkern
