; What the kernels in Triton call of NVSHMEM (wire_nvshmem.py). Linked before NVSHMEM's bitcode, read
; as text by LLVM of Triton 3.7 and later.
;
; Triton calls an extern on every thread of the block, with arguments that are equal on all of them:
;   - put: a function for the whole block;
;   - signal, quiet: thread 0 calls the library, then its warp meets again;
;   - test: lane 0 alone, which one thread holds; the others return 0 (see external.py).
;
; noinline: the library's code once in a kernel, not at each call.

target triple = "nvptx64-nvidia-cuda"

declare void @nvshmemx_putmem_signal_nbi_block(ptr, ptr, i64, ptr, i64, i32, i32)
declare void @nvshmemx_signal_op(ptr, i64, i32, i32)
declare i32 @nvshmem_uint64_test(ptr, i32, i64)
declare void @nvshmem_quiet()
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare void @llvm.nvvm.bar.warp.sync(i32)

; 9: NVSHMEM_SIGNAL_SET
define i64 @fastkern_nvshmem_put(i64 %to, i64 %source, i64 %bytes, i64 %flag, i64 %stamp, i64 %pe) noinline convergent {
  %to.p = inttoptr i64 %to to ptr
  %source.p = inttoptr i64 %source to ptr
  %flag.p = inttoptr i64 %flag to ptr
  %pe.i = trunc i64 %pe to i32
  call void @nvshmemx_putmem_signal_nbi_block(ptr %to.p, ptr %source.p, i64 %bytes, ptr %flag.p, i64 %stamp, i32 9, i32 %pe.i)
  ret i64 0
}

define i64 @fastkern_nvshmem_signal(i64 %word, i64 %value, i64 %operation, i64 %pe) noinline convergent {
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %first = icmp eq i32 %tid, 0
  br i1 %first, label %one, label %all
one:
  %word.p = inttoptr i64 %word to ptr
  %operation.i = trunc i64 %operation to i32
  %pe.i = trunc i64 %pe to i32
  call void @nvshmemx_signal_op(ptr %word.p, i64 %value, i32 %operation.i, i32 %pe.i)
  br label %all
all:
  call void @llvm.nvvm.bar.warp.sync(i32 -1)
  ret i64 0
}

define i64 @fastkern_nvshmem_quiet(i64 %ignored) noinline convergent {
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %first = icmp eq i32 %tid, 0
  br i1 %first, label %one, label %all
one:
  call void @nvshmem_quiet()
  br label %all
all:
  call void @llvm.nvvm.bar.warp.sync(i32 -1)
  ret i64 0
}

define i64 @fastkern_nvshmem_test(i64 %lane, i64 %flag, i64 %stamp) alwaysinline convergent {
  %first = icmp eq i64 %lane, 0
  br i1 %first, label %one, label %all
one:
  %found = call i64 @fastkern_nvshmem_test_one(i64 %flag, i64 %stamp)
  br label %all
all:
  %result = phi i64 [ 0, %0 ], [ %found, %one ]
  ret i64 %result
}

; 5: NVSHMEM_CMP_GE
define i64 @fastkern_nvshmem_test_one(i64 %flag, i64 %stamp) noinline {
  %flag.p = inttoptr i64 %flag to ptr
  %found = call i32 @nvshmem_uint64_test(ptr %flag.p, i32 5, i64 %stamp)
  %result = zext i32 %found to i64
  ret i64 %result
}
