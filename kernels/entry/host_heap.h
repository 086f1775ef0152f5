// The control part of the symmetric heap on the host, and its address arithmetic: one definition
// for sizes and pointers. Every rank's region has the same shape:
//   Control | Mailbox | acks[R] | records[2][R] | flags[slots] | visible_ns[slots]
#pragma once

#include <vector>

#include "kernels/body/args.h"

namespace fastkern {

// How rank 0 announces a new data segment.
struct Mailbox {
    u64 generation;  // written last, with release
    u64 bytes_per_rank;
    u32 status;  // 0: created; else the errno of the failure
    u32 reserved;
    char name[104];
};
static_assert(sizeof(Mailbox) == 128, "layout");

struct ControlLayout {
    u32 num_ranks;
    u32 num_slots;     // FlagLayout::num_slots
    u64 record_bytes;  // payload of one rank's record, a multiple of 8

    u64 mailbox() const { return 256; }
    u64 acks() const { return mailbox() + sizeof(Mailbox); }
    u64 records() const { return acks() + u64{num_ranks} * 8; }
    // A record is its epoch word, then its payload. Two sets, in turn by epoch.
    u64 record(u64 epoch, u32 writer) const {
        return records() + ((epoch % 2) * num_ranks + writer) * (8 + record_bytes);
    }
    u64 flags() const { return (record(1, num_ranks - 1) + 8 + record_bytes + 63) / 64 * 64; }
    u64 visible() const { return flags() + u64{num_slots} * 8; }
    u64 bytes() const { return (visible() + u64{num_slots} * 8 + 4095) / 4096 * 4096; }
};
static_assert(sizeof(Control) <= 256, "Control grew into the mailbox");

// One rank's view of all ranks' regions and data.
struct HeapView {
    std::vector<Control*> controls;
    std::vector<u64*> flags, visible_ns;
    std::vector<u8*> data;

    void map_control(u8* base, const ControlLayout& layout) {
        for (u32 r = 0; r < layout.num_ranks; ++r) {
            u8* region = base + r * layout.bytes();
            controls.push_back(reinterpret_cast<Control*>(region));
            flags.push_back(reinterpret_cast<u64*>(region + layout.flags()));
            visible_ns.push_back(reinterpret_cast<u64*>(region + layout.visible()));
        }
    }
    void map_data(u8* base, u64 bytes_per_rank) {
        data.clear();
        for (std::size_t r = 0; r < controls.size(); ++r) data.push_back(base + r * bytes_per_rank);
    }
};

}  // namespace fastkern
