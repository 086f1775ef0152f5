#include "kernels/entry/host_rank.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "kernels/target/host.h"

namespace fastkern {

namespace {

[[noreturn]] void fail(int error, const std::string& what) {
    throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

SharedMemory::SharedMemory(const std::string& name, u64 bytes, bool create)
    : name_(name), bytes_(bytes) {
    const int fd = shm_open(name.c_str(), create ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
    if (fd < 0) fail(errno, "shared memory " + name);
    linked_ = create;
    int error = 0;
    if (create) {
        error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    } else {
        struct stat s{};
        if (fstat(fd, &s) != 0)
            error = errno;
        else if (static_cast<u64>(s.st_size) < bytes)
            error = EINVAL;
    }
    void* base = MAP_FAILED;
    if (!error) {
        base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) error = errno;
    }
    ::close(fd);
    if (error) {
        unlink();
        fail(error, "shared memory of " + std::to_string(bytes) + " bytes");
    }
    base_ = static_cast<u8*>(base);
}

SharedMemory::~SharedMemory() {
    unlink();
    if (base_) munmap(base_, bytes_);
}

void SharedMemory::unlink() {
    if (linked_) shm_unlink(name_.c_str());
    linked_ = false;
}

HostRank::HostRank(u32 rank, const ControlLayout& layout, u8* control_base)
    : rank_(rank), layout_(layout), control_base_(control_base) {
    heap_.map_control(control_base, layout);
}

template <class Ready>
Outcome HostRank::wait(u64 slice_ns, const Ready& ready) const {
    HostBlock none;
    const HostTarget target(&none, 0, 0);
    const u64 end = target.now_ns() + slice_ns;
    for (u32 rounds = 0;; ++rounds) {
        if (ready()) return Outcome::kDone;
        if (abort_word()) return Outcome::kAborted;
        if (target.now_ns() > end) return Outcome::kTimeout;
        target.pause(rounds);
    }
}

void HostRank::post_record(u64 epoch, const u8* payload, u64 bytes) {
    for (u32 k = 0; k < layout_.num_ranks; ++k) {
        const u32 r = (rank_ + k) % layout_.num_ranks;
        const u64 at = layout_.record(epoch, rank_);
        std::memcpy(region(r) + at + 8, payload, bytes);
        HostTarget::store_release(word(r, at), epoch);
    }
}

Outcome HostRank::await_records(u64 epoch, u64 slice_ns) {
    u32 next = 0;
    return wait(slice_ns, [&] {
        while (next < layout_.num_ranks &&
               HostTarget::load_acquire(word(rank_, layout_.record(epoch, next))) >= epoch)
            ++next;
        return next == layout_.num_ranks;
    });
}

std::vector<u32> HostRank::missing_records(u64 epoch) const {
    std::vector<u32> missing;
    for (u32 r = 0; r < layout_.num_ranks; ++r)
        if (HostTarget::load_acquire(word(rank_, layout_.record(epoch, r))) < epoch)
            missing.push_back(r);
    return missing;
}

const u8* HostRank::record(u64 epoch, u32 writer) const {
    return region(rank_) + layout_.record(epoch, writer) + 8;
}

void HostRank::announce(u64 generation, const std::string& name, u64 bytes_per_rank, u32 status) {
    if (name.size() >= sizeof(Mailbox::name))
        throw std::invalid_argument("segment name is too long");
    for (u32 r = 0; r < layout_.num_ranks; ++r) {
        auto* box = reinterpret_cast<Mailbox*>(region(r) + layout_.mailbox());
        box->bytes_per_rank = bytes_per_rank;
        box->status = status;
        std::memset(box->name, 0, sizeof box->name);
        std::memcpy(box->name, name.c_str(), name.size());
        HostTarget::store_release(&box->generation, generation);
    }
}

const Mailbox& HostRank::mailbox() const {
    return *reinterpret_cast<const Mailbox*>(region(rank_) + layout_.mailbox());
}

Outcome HostRank::await_mailbox(u64 generation, u64 slice_ns) {
    return wait(slice_ns,
                [&] { return HostTarget::load_acquire(&mailbox().generation) >= generation; });
}

void HostRank::acknowledge(u64 generation) {
    HostTarget::store_release(word(0, layout_.acks() + u64{rank_} * 8), generation);
}

Outcome HostRank::await_acks(u64 generation, u64 slice_ns) {
    return wait(slice_ns, [&] { return missing_acks(generation).empty(); });
}

std::vector<u32> HostRank::missing_acks(u64 generation) const {
    std::vector<u32> missing;
    for (u32 r = 0; r < layout_.num_ranks; ++r)
        if (HostTarget::load_acquire(word(0, layout_.acks() + u64{r} * 8)) < generation)
            missing.push_back(r);
    return missing;
}

void HostRank::map_data(u8* base, u64 bytes_per_rank) { heap_.map_data(base, bytes_per_rank); }

bool HostRank::launch(const u8* table, const u8* input, u8* output, const MoeArgs* moe, u64 epoch,
                      u64 progress_ns, const LaunchOptions& options) {
    KernelArgs args{};
    args.table = table;
    args.input = input;
    args.output = output;
    args.moe = moe;
    args.controls = heap_.controls.data();
    args.flags = heap_.flags.data();
    args.visible_ns = heap_.visible_ns.data();
    args.data = heap_.data.data();
    args.epoch = epoch;
    args.progress_ns = progress_ns;
    args.rank = rank_;
    if (!trace_.empty()) {
        args.trace = trace_.data();
        args.trace_count = &trace_count_;
        args.trace_capacity = trace_.size();
    }
    return launch_on_host(args, options);
}

void HostRank::start_trace(u64 capacity) {
    trace_.assign(capacity, TraceEvent{});
    trace_count_ = 0;
}

std::vector<TraceEvent> HostRank::stop_trace() {
    std::vector<TraceEvent> events;
    events.swap(trace_);
    if (trace_count_ < events.size()) events.resize(trace_count_);
    return events;
}

u64 HostRank::abort_word() const { return HostTarget::load_acquire(&heap_.controls[rank_]->abort); }

void HostRank::abort_all(u64 epoch) {
    u64* home = &heap_.controls[0]->abort;  // as abort_call in the kernel: one origin for all
    HostTarget::compare_and_swap(home, 0, epoch << kValueBits | (rank_ + 1));
    const u64 word = HostTarget::load_acquire(home);
    for (Control* c : heap_.controls) HostTarget::compare_and_swap(&c->abort, 0, word);
}

const ErrorRecord& HostRank::error(u32 origin) const { return heap_.controls[origin]->record; }

u64 HostRank::completed_epoch() const {
    return HostTarget::load_acquire(&heap_.controls[rank_]->epoch);
}

}  // namespace fastkern
