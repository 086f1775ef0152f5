// With device/nvshmem_defines.h.
#pragma once
