// What claims_check.cc runs on: tables, inputs and outputs of all ranks, and their heap.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "kernels/entry/host_threads.h"
//
#include "kernels/body/exchange.h"
#include "kernels/entry/host_heap.h"

using namespace fastkern;

#define CHECK(what)                                             \
    do {                                                        \
        if (!(what)) {                                          \
            std::printf("line %d: not: %s\n", __LINE__, #what); \
            std::fflush(stdout);                                \
            std::_Exit(1);                                      \
        }                                                       \
    } while (0)

namespace {

using Bytes = std::vector<u8>;

struct RankFiles {
    Bytes table, input, output;
};

Bytes read_bytes(std::ifstream& file) {
    u64 size = 0;
    file.read(reinterpret_cast<char*>(&size), sizeof size);
    Bytes bytes((size + 7) / 8 * 8);
    file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    bytes.resize(size);
    return bytes;
}

std::vector<RankFiles> read_ranks(const char* path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<RankFiles> ranks;
    do {
        RankFiles r;
        r.table = read_bytes(file);
        r.input = read_bytes(file);
        r.output = read_bytes(file);
        CHECK(file);
        ranks.push_back(std::move(r));
    } while (file.peek() != std::ifstream::traits_type::eof());
    CHECK(view_table(ranks[0].table.data()).header->num_ranks == ranks.size());
    return ranks;
}

// The heap of all ranks, and what one is launched with.
struct Heap {
    explicit Heap(const std::vector<RankFiles>& ranks) {
        const Header& h = *view_table(ranks[0].table.data()).header;
        const FlagLayout flags{h.num_ranks, h.servers, h.gpus_per_server, h.chunk_slots};
        const ControlLayout layout{h.num_ranks, flags.num_slots(), 8};
        num_slots = flags.num_slots();
        u64 data_bytes = 0;
        for (const RankFiles& r : ranks)
            data_bytes =
                std::max(data_bytes, data_layout(*view_table(r.table.data()).header).bytes);
        control.resize(layout.bytes() * h.num_ranks / 8);
        data.resize(data_bytes * h.num_ranks);
        view.map_control(reinterpret_cast<u8*>(control.data()), layout);
        view.map_data(data.data(), data_bytes);
    }
    KernelArgs args_of(const RankFiles& files, u32 rank, u8* output) {
        KernelArgs args{};
        args.table = files.table.data();
        args.input = files.input.data();
        args.output = output;
        args.controls = view.controls.data();
        args.flags = view.flags.data();
        args.visible_ns = view.visible_ns.data();
        args.data = view.data.data();
        args.epoch = 1;
        args.progress_ns = 60'000'000'000;
        args.num_blocks = 1;
        args.rank = rank;
        return args;
    }
    std::vector<u64> control;
    Bytes data;
    HeapView view;
    u32 num_slots;
};

}  // namespace
