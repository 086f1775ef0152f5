; What the kernels in Triton call of NCCL's device API (wire_gin.py). Linked before NCCL's bitcode,
; read as text by LLVM of Triton 3.7 and later.
;
; Triton calls an extern on every thread of the block, with arguments that are equal on all of them:
;   - put, add, set: thread 0 calls the library, then its warp meets again;
;   - signal, counter: lane 0 alone, which one thread holds; the others return 0 (see external.py).
;
; noinline: the library's code once in a kernel, not at each call.
;
; Numbers: 28 backends, all but EFA_GDA, which knows no signals at addresses. Signal of type 1, at an
; address; operation 1, add. Scopes: given 10, thread; required 0, system. Memory order 2, acquire.
; Counter 0, of 56 bits. Segments of type 0, on the device.

target triple = "nvptx64-nvidia-cuda"

%team = type { i32, i32, i32 }
%coop = type { { [16 x i8] }, ptr }

declare void @ncclGin_C_init(ptr, i32, ptr, i32)
declare %team @ncclTeamWorld(ptr)
declare void @ncclGinPut_v3(ptr, ptr byval(%team), i32, ptr, i64, ptr, i64, i64, i32, ptr, i64, i32, i1, i32, i64, i1, i32, ptr byval(%coop), i1, ptr, i32, i32, i32, i32)
declare void @ncclGinPutValue_v3(ptr, ptr byval(%team), i32, ptr, i64, i64, i64, i32, ptr, i64, i32, i1, i32, i64, ptr byval(%coop), i1, ptr, i32, i32, i32)
declare void @ncclGinSignal_v3(ptr, ptr byval(%team), i32, i32, ptr, i64, i32, i1, i32, i64, ptr byval(%coop), i1, ptr, i32, i32, i32)
declare i64 @ncclGinReadSignalVA(ptr, ptr, i64, i32, i32)
declare i64 @ncclGinReadCounter(ptr, i32, i32, i32)
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare void @llvm.nvvm.bar.warp.sync(i32)

; A group of one thread, as ncclCoopAny: its rank, its size, its barrier.
define internal i32 @fastkern_gin_rank(ptr %ignored) {
  ret i32 0
}
define internal i32 @fastkern_gin_size(ptr %ignored) {
  ret i32 1
}
define internal void @fastkern_gin_sync(ptr %ignored) {
  ret void
}
@fastkern_gin_thread = internal constant [3 x ptr] [ptr @fastkern_gin_rank, ptr @fastkern_gin_size, ptr @fastkern_gin_sync]

define internal void @fastkern_gin_begin(ptr %gin, ptr %team, ptr %coop, i64 %comm, i64 %context) alwaysinline {
  %comm.p = inttoptr i64 %comm to ptr
  %context.i = trunc i64 %context to i32
  call void @ncclGin_C_init(ptr %gin, i32 28, ptr %comm.p, i32 %context.i)
  %world = call %team @ncclTeamWorld(ptr %comm.p)
  store %team %world, ptr %team
  %vtable = getelementptr %coop, ptr %coop, i32 0, i32 1
  store ptr @fastkern_gin_thread, ptr %vtable
  ret void
}

; Bytes of the data's window, then %add to a word of the other one; the context's counter once they
; have been read.
define i64 @fastkern_gin_put(i64 %comm, i64 %context, i64 %peer, i64 %data, i64 %to, i64 %source, i64 %bytes, i64 %window, i64 %flag, i64 %add) noinline convergent {
  %gin = alloca [128 x i8], align 16
  %team = alloca %team, align 8
  %coop = alloca %coop, align 8
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %first = icmp eq i32 %tid, 0
  br i1 %first, label %one, label %all
one:
  %peer.i = trunc i64 %peer to i32
  %data.p = inttoptr i64 %data to ptr
  %window.p = inttoptr i64 %window to ptr
  call void @fastkern_gin_begin(ptr %gin, ptr %team, ptr %coop, i64 %comm, i64 %context)
  call void @ncclGinPut_v3(ptr %gin, ptr byval(%team) %team, i32 %peer.i, ptr %data.p, i64 %to, ptr %data.p, i64 %source, i64 %bytes, i32 1, ptr %window.p, i64 %flag, i32 0, i1 false, i32 1, i64 %add, i1 true, i32 0, ptr byval(%coop) %coop, i1 false, ptr null, i32 10, i32 0, i32 0, i32 0)
  br label %all
all:
  call void @llvm.nvvm.bar.warp.sync(i32 -1)
  ret i64 0
}

define i64 @fastkern_gin_add(i64 %comm, i64 %context, i64 %peer, i64 %window, i64 %word, i64 %value) noinline convergent {
  %gin = alloca [128 x i8], align 16
  %team = alloca %team, align 8
  %coop = alloca %coop, align 8
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %first = icmp eq i32 %tid, 0
  br i1 %first, label %one, label %all
one:
  %peer.i = trunc i64 %peer to i32
  %window.p = inttoptr i64 %window to ptr
  call void @fastkern_gin_begin(ptr %gin, ptr %team, ptr %coop, i64 %comm, i64 %context)
  call void @ncclGinSignal_v3(ptr %gin, ptr byval(%team) %team, i32 %peer.i, i32 1, ptr %window.p, i64 %word, i32 0, i1 false, i32 1, i64 %value, ptr byval(%coop) %coop, i1 false, ptr null, i32 10, i32 0, i32 0)
  br label %all
all:
  call void @llvm.nvvm.bar.warp.sync(i32 -1)
  ret i64 0
}

; 8 bytes; without a signal (type 0). Scope required: 1, the device, as NCCL has it by default.
define i64 @fastkern_gin_set(i64 %comm, i64 %context, i64 %peer, i64 %window, i64 %word, i64 %value) noinline convergent {
  %gin = alloca [128 x i8], align 16
  %team = alloca %team, align 8
  %coop = alloca %coop, align 8
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %first = icmp eq i32 %tid, 0
  br i1 %first, label %one, label %all
one:
  %peer.i = trunc i64 %peer to i32
  %window.p = inttoptr i64 %window to ptr
  call void @fastkern_gin_begin(ptr %gin, ptr %team, ptr %coop, i64 %comm, i64 %context)
  call void @ncclGinPutValue_v3(ptr %gin, ptr byval(%team) %team, i32 %peer.i, ptr %window.p, i64 %word, i64 %value, i64 8, i32 0, ptr null, i64 0, i32 0, i1 false, i32 0, i64 0, ptr byval(%coop) %coop, i1 false, ptr null, i32 10, i32 1, i32 0)
  br label %all
all:
  call void @llvm.nvvm.bar.warp.sync(i32 -1)
  ret i64 0
}

define i64 @fastkern_gin_signal(i64 %lane, i64 %window, i64 %word) alwaysinline convergent {
  %first = icmp eq i64 %lane, 0
  br i1 %first, label %one, label %all
one:
  %found = call i64 @fastkern_gin_signal_one(i64 %window, i64 %word)
  br label %all
all:
  %result = phi i64 [ 0, %0 ], [ %found, %one ]
  ret i64 %result
}
define i64 @fastkern_gin_signal_one(i64 %window, i64 %word) noinline {
  %window.p = inttoptr i64 %window to ptr
  %result = call i64 @ncclGinReadSignalVA(ptr null, ptr %window.p, i64 %word, i32 64, i32 2)
  ret i64 %result
}

define i64 @fastkern_gin_counter(i64 %lane, i64 %comm, i64 %context) alwaysinline convergent {
  %first = icmp eq i64 %lane, 0
  br i1 %first, label %one, label %all
one:
  %found = call i64 @fastkern_gin_counter_one(i64 %comm, i64 %context)
  br label %all
all:
  %result = phi i64 [ 0, %0 ], [ %found, %one ]
  ret i64 %result
}
define i64 @fastkern_gin_counter_one(i64 %comm, i64 %context) noinline {
  %gin = alloca [128 x i8], align 16
  %comm.p = inttoptr i64 %comm to ptr
  %context.i = trunc i64 %context to i32
  call void @ncclGin_C_init(ptr %gin, i32 28, ptr %comm.p, i32 %context.i)
  %result = call i64 @ncclGinReadCounter(ptr %gin, i32 0, i32 56, i32 2)
  ret i64 %result
}
