// The kernels of one instruction set: KVX_ISA is its name, KVX_VECTOR_BYTES the size of its
// registers, KVX_VBMI whether it has byte lookups. Included by kernels.cc once per instruction set,
// inside its namespace.

#include "cpu/kernels/copy.inl"
#if KVX_VECTOR_BYTES == 64
#include "cpu/kernels/e4m3.inl"
#endif
#if KVX_VBMI
#include "cpu/kernels/fp8.inl"
#endif
#include "cpu/kernels/affine.inl"
#include "cpu/kernels/attend.inl"
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/fits.inl"
#include "cpu/kernels/float_lanes.inl"
#include "cpu/kernels/hadamard.inl"
#include "cpu/kernels/halves32.inl"
#include "cpu/kernels/hybrid.inl"
#include "cpu/kernels/lossless.inl"
#include "cpu/kernels/turboquant.inl"
#include "cpu/kernels/units32.inl"
#if KVX_VECTOR_BYTES >= 32
#include "cpu/kernels/q8_0.inl"
#endif
#include "cpu/kernels/vectors.inl"
#include "cpu/kernels/vectors_fp4.inl"
#include "cpu/kernels/vectors_from_floats.inl"
#include "cpu/kernels/vectors_to_floats.inl"
#include "cpu/kernels/vectors_turboquant.inl"

constexpr Kernels kKernels = {
    KVX_ISA,
    copy,
    {
        {nullptr, convert_run<F16, Bf16>, convert_run<F16, F32>, convert_run<F16, E4m3>,
         convert_run<F16, E5m2>},
        {convert_run<Bf16, F16>, nullptr, convert_run<Bf16, F32>, convert_run<Bf16, E4m3>,
         convert_run<Bf16, E5m2>},
        {convert_run<F32, F16>, convert_run<F32, Bf16>, nullptr, convert_run<F32, E4m3>,
         convert_run<F32, E5m2>},
        {convert_run<E4m3, F16>, convert_run<E4m3, Bf16>, convert_run<E4m3, F32>,
         convert_run<E4m3, E4m3>, convert_run<E4m3, E5m2>},
        {convert_run<E5m2, F16>, convert_run<E5m2, Bf16>, convert_run<E5m2, F32>,
         convert_run<E5m2, E4m3>, convert_run<E5m2, E5m2>},
    },
    {
        {rows_of<F16, F16>(), rows_of<F16, Bf16>(), rows_of<F16, F32>(), rows_of<F16, E4m3>(),
         rows_of<F16, E5m2>()},
        {rows_of<Bf16, F16>(), rows_of<Bf16, Bf16>(), rows_of<Bf16, F32>(), rows_of<Bf16, E4m3>(),
         rows_of<Bf16, E5m2>()},
        {rows_of<F32, F16>(), rows_of<F32, Bf16>(), rows_of<F32, F32>(), rows_of<F32, E4m3>(),
         rows_of<F32, E5m2>()},
        {rows_of<E4m3, F16>(), rows_of<E4m3, Bf16>(), rows_of<E4m3, F32>(), rows_of<E4m3, E4m3>(),
         rows_of<E4m3, E5m2>()},
        {rows_of<E5m2, F16>(), rows_of<E5m2, Bf16>(), rows_of<E5m2, F32>(), rows_of<E5m2, E4m3>(),
         rows_of<E5m2, E5m2>()},
    },
    {{nullptr,
#define KVX_ROW(name, codec, ...) to_units<F16, codec>(),
      KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
     },
     {nullptr,
#define KVX_ROW(name, codec, ...) to_units<Bf16, codec>(),
      KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
     },
     {nullptr,
#define KVX_ROW(name, codec, ...) to_units<F32, codec>(),
      KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
     }},
    {{nullptr,
#define KVX_ROW(name, codec, ...) units_to<codec, F16>(),
      KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
     },
     {nullptr,
#define KVX_ROW(name, codec, ...) units_to<codec, Bf16>(),
      KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
     },
     {nullptr,
#define KVX_ROW(name, codec, ...) units_to<codec, F32>(),
      KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
     }},
    {nullptr,
#define KVX_ROW(name, codec, ...) VectorsOf<codec>::decode,
     KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
    },
    {nullptr,
#define KVX_ROW(name, codec, ...) VectorsOf<codec>::encode,
     KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
    },
    affine_kernels<U8Zero>(),
    affine_kernels<U8Bias>(),
    {fp4_decode, fp4_encode},
    bound_run,
    bound_each,
    hadamard,
    {lossless_split, lossless_join, lossless_pack, lossless_unpack, lossless_count},
    {turboquant_encode, turboquant_decode, turboquant_encode_signs, turboquant_decode_signs,
     turboquant_encode_steps, turboquant_decode_steps},
    {dot_keys, softmax_run, add_values},
    {weigh<F32>, weigh<Bf16>}};
