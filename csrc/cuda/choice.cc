#include "cuda/choice.h"

#include <algorithm>

#include "formats/codec.h"
#include "plan/loops.h"

namespace kvx::cuda {
namespace {

constexpr uint32_t kElementsPerUnit = 8;  // of a conversion
constexpr uint32_t kWideUnit = 16;        // of one from FP8 to 16 bits, of which two lanes take two
constexpr uint64_t kWarpsWanted = 4096;   // about what a large device runs at a time
constexpr uint32_t kTokensPerWarp = 4;    // where there are many
constexpr uint32_t kTokensPerRemap = 8;   // by 4 units: whole sectors of 32 bytes at both ends
constexpr uint32_t kTileBytes = 128;      // of tokens at the inner end of a tile
constexpr uint64_t kMostSlotVectors = 2 * kWarpsWanted * kWarp;  // more take other kernels
constexpr uint64_t kTilesWanted = 256;    // give each multiprocessor of a large device one
constexpr uint64_t kChunksWanted = 1024;  // of runs or whole heads
constexpr uint64_t kLeastBytes = 4 << 10, kMostBytes = 32 << 10, kMostBulkBytes = 128 << 10;

bool has_dense_vectors(const Plane &plane, uint32_t head_dim) {
  return plane.pack == head_dim && plane.inner_stride == size_of(plane.dtype);
}

bool varies(const Scales &scales) { return scales.head_stride != 0; }

bool is_power_of_two(int64_t number) { return (number & (number - 1)) == 0; }

// Turns a copy of units into a copy of bytes, which vectors of every size can move; false: dim has
// too many parts.
bool take_for_bytes(PlanePair *shape) {
  const auto bytes = static_cast<uint32_t>(size_of(shape->src.dtype));
  for (Plane *plane : {&shape->src, &shape->dst}) {
    if (plane->inner_stride != bytes && plane->pack != shape->head_dim) return false;
  }
  for (Plane *plane : {&shape->src, &shape->dst}) {
    if (plane->inner_stride == bytes) {
      plane->pack *= bytes;
    } else {
      plane->outer_stride = plane->inner_stride;
      plane->pack = bytes;
    }
    plane->inner_stride = 1;
    plane->dtype = KVX_DTYPE_U8;
  }
  shape->head_dim *= bytes;
  return true;
}

// Completes `choice` for kernels that work on units of the formats.
Choice choose_units(Choice choice) {
  const PlanePair &shape = choice.shape;
  const auto numbers = [&](const Plane &plane) {
    return shape.convert ? static_cast<uint32_t>(numbers_of(plane.dtype, 1)) : 1;
  };
  Units &units = choice.units;
  choice.kernel = Kernel::kUnits;
  units.elements = std::max({numbers(shape.src), numbers(shape.dst), shape.hadamard});
  units.per_head = FastDiv(shape.head_dim / units.elements);
  units.per_token = FastDiv(shape.num_heads * units.per_head.divisor);
  units.dst_units = units.elements / numbers(shape.dst);
  units.dst_bytes = static_cast<uint32_t>(size_of(shape.dst.dtype));
  units.bytes =
      units.elements / numbers(shape.src) * static_cast<uint32_t>(size_of(shape.src.dtype));
  choice.unit_bytes = units.bytes;
  return choice;
}

// Merges heads that follow each other at both ends into one long head.
void merge_heads(PlanePair *shape) {
  const auto follow = [&](const Plane &plane) {
    return has_dense_vectors(plane, shape->head_dim) &&
           plane.head_stride == int64_t{shape->head_dim} * size_of(plane.dtype);
  };
  if (shape->num_heads == 1 || shape->find_scales || varies(shape->src_scales) ||
      varies(shape->dst_scales) || !follow(shape->src) || !follow(shape->dst)) {
    return;
  }
  shape->head_dim *= shape->num_heads;
  shape->num_heads = 1;
  shape->src.pack = shape->dst.pack = shape->head_dim;
}

// Whether vectors consist of units of `elements`, each contiguous and aligned to `alignment`.
bool holds_units(const Plane &plane, uint32_t head_dim, uint32_t elements, uint64_t alignment) {
  const int64_t strides = plane.block_stride | plane.token_stride | plane.head_stride |
                          (plane.pack == head_dim ? 0 : plane.outer_stride);
  return (elements == 1 || plane.inner_stride == size_of(plane.dtype)) &&
         plane.pack % elements == 0 && static_cast<uint64_t>(strides) % alignment == 0;
}

Units units_of(const PlanePair &shape, uint32_t elements) {
  Units units;
  units.elements = elements;
  units.bytes = elements * static_cast<uint32_t>(size_of(shape.src.dtype));
  units.dst_bytes =
      shape.convert ? elements * static_cast<uint32_t>(size_of(shape.dst.dtype)) : units.bytes;
  units.per_head = FastDiv(shape.head_dim / elements);
  units.per_token = FastDiv(shape.num_heads * units.per_head.divisor);
  units.src_per_pack = FastDiv(shape.src.pack / elements);
  units.dst_per_pack = FastDiv(shape.dst.pack / elements);
  return units;
}

// Whether the same element of the next token is closer than the next element of the token.
bool is_token_inner(const Plane &plane, uint32_t head_dim, int64_t unit_bytes) {
  return plane.token_stride == unit_bytes &&
         (plane.pack != head_dim || plane.inner_stride != size_of(plane.dtype));
}

// The tokens of a run: 1 if each token is a run that follows the one before at both ends, those of
// a block if its interior is the same bytes at both ends, else 0.
uint32_t find_runs(const PlanePair &shape, uint64_t alignment, uint32_t block_tokens) {
  const Plane &src = shape.src, &dst = shape.dst;
  if (alignment % kVectorBytes || src.block_stride % kVectorBytes ||
      dst.block_stride % kVectorBytes || !can_loop(src, dst)) {
    return 0;
  }
  const auto run_of = [&](int64_t tokens) {
    Loops loops;
    make_loops(src, dst, tokens, shape.num_heads, shape.head_dim, size_of(src.dtype), &loops);
    return loops.count == 0 && loops.run % kVectorBytes == 0 ? loops.run : 0;
  };
  const int64_t token = run_of(1);
  const auto follow = [&](int64_t stride) { return stride == token || stride == 0; };
  if (token && follow(src.token_stride) && follow(dst.token_stride)) return 1;
  return block_tokens > 1 && block_tokens <= kThreads && run_of(block_tokens) ? block_tokens : 0;
}

}  // namespace

Choice choose(const PlanePair &pair, uint64_t alignment, uint32_t block_tokens, bool background) {
  Choice choice{Kernel::kGeneric, 0, 0, pair, {}};
  PlanePair &shape = choice.shape;
  const bool are_scalar = is_scalar(shape.src.dtype) && is_scalar(shape.dst.dtype);
  if (shape.convert && (!are_scalar || shape.hadamard)) return choose_units(choice);
  if (!is_power_of_two(size_of(shape.src.dtype)) && !shape.convert && !take_for_bytes(&shape))
    return choose_units(choice);
  merge_heads(&shape);
  const auto src_bytes = static_cast<uint32_t>(size_of(shape.src.dtype));
  const auto dst_bytes = static_cast<uint32_t>(size_of(shape.dst.dtype));
  if (shape.convert) {
    const auto fits = [&](const Plane &plane, uint32_t bytes, uint32_t elements) {
      const uint32_t vector = std::min(elements * bytes, kVectorBytes);
      return alignment % vector == 0 && holds_units(plane, shape.head_dim, elements, vector);
    };
    const bool has_units = is_fast(shape.src.dtype) && is_fast(shape.dst.dtype) &&
                           !(takes_scale(shape.src.dtype) && takes_scale(shape.dst.dtype)) &&
                           fits(shape.src, src_bytes, kElementsPerUnit) &&
                           fits(shape.dst, dst_bytes, kElementsPerUnit);
    if (shape.find_scales) {
      const bool fits_warp = has_units && shape.head_dim <= kWarp * kElementsPerUnit;
      choice.kernel = Kernel::kQuantize;
      choice.units = units_of(shape, fits_warp ? kElementsPerUnit : 1);
      choice.unit_bytes = choice.units.elements * src_bytes;
      return choice;
    }
    if (has_units) {
      choice.kernel = Kernel::kConvert;
      const bool is_wide = takes_scale(shape.src.dtype) && dst_bytes == 2 &&
                           fits(shape.src, src_bytes, kWideUnit) &&
                           fits(shape.dst, dst_bytes, 2 * kWideUnit);  // of two lanes
      choice.units = units_of(shape, is_wide ? kWideUnit : kElementsPerUnit);
      choice.unit_bytes = choice.units.bytes;
      return choice;
    }
  } else if (!shape.convert) {
    for (uint32_t vector = kVectorBytes; vector >= src_bytes; vector /= 2) {
      const uint32_t elements = vector / src_bytes;
      if (alignment % vector || !holds_units(shape.src, shape.head_dim, elements, vector) ||
          !holds_units(shape.dst, shape.head_dim, elements, vector)) {
        continue;
      }
      choice.units = units_of(shape, elements);
      choice.unit_bytes = vector;
      const bool src_inner = is_token_inner(shape.src, shape.head_dim, vector);
      const bool dst_inner = is_token_inner(shape.dst, shape.head_dim, vector);
      const bool src_follows = shape.src.inner_stride == src_bytes;
      const bool dst_follows = shape.dst.inner_stride == src_bytes;
      choice.run_tokens = find_runs(shape, alignment, block_tokens);
      if (choice.run_tokens) {
        choice.kernel = background && choice.run_tokens <= kWarp ? Kernel::kBulk : Kernel::kBlocks;
      } else if (src_inner != dst_inner && vector <= 4 && (src_inner ? dst_follows : src_follows)) {
        choice.kernel = Kernel::kTile;
      } else if (src_inner || dst_inner) {
        choice.kernel = Kernel::kRemap;
      } else if (!src_follows || !dst_follows) {
        choice.kernel = Kernel::kGeneric;
      } else {  // a warp is too wide for a small token
        const bool is_small = choice.units.per_token.divisor <= 2 * kWarp;
        choice.kernel = is_small ? Kernel::kRemap : Kernel::kVectors;
      }
      return choice;
    }
  }
  choice.units = units_of(shape, 1);
  choice.unit_bytes = src_bytes;
  return choice;
}

Choice choose_affine(const PlanePair &shape, const AffinePair &affine) {
  const auto numbers = static_cast<uint32_t>(numbers_of(shape.dst.dtype, 1));
  Choice choice{Kernel::kAffine, 1, 0, shape, {}};
  Units &units = choice.units;
  units.elements = affine.dst.group ? affine.dst.group : numbers;
  units.dst_units = 1;
  units.dst_bytes = static_cast<uint32_t>(size_of(shape.dst.dtype));
  if (has_group_scales(shape.dst.dtype)) choice.kernel = Kernel::kFp4;
  if (affine.dst.covers_tokens) {
    choice.kernel = Kernel::kChannels;
    choice.run_tokens = affine.block_size;
    units.elements = kWarp;
  }
  units.per_head = FastDiv((shape.head_dim - 1) / units.elements + 1);
  units.per_token = FastDiv(shape.num_heads * units.per_head.divisor);
  return choice;
}

bool is_for_slots(const Choice &choice, const Rows &rows, const LookupPair &lookup,
                  uint64_t num_pairs) {
  const Plane &src = choice.shape.src, &dst = choice.shape.dst;
  const Lookup &from = lookup.src, &to = lookup.dst;
  if (choice.kernel != Kernel::kBlocks && choice.kernel != Kernel::kVectors &&
      choice.kernel != Kernel::kRemap) {
    return false;
  }
  const uint64_t tokens = rows.uniform_len;
  return rows.count == 1 && !rows.lens.data && tokens == rows.max_len &&
         from.mode == LookupMode::kDense && !from.starts.data && from.tokens_per_entry == 1 &&
         tokens <= from.block_size && to.mode == LookupMode::kSlots && !to.planes_per_entry &&
         tokens <= to.indices_count && has_dense_vectors(src, choice.shape.head_dim) &&
         dst.inner_stride == size_of(dst.dtype) &&
         tokens * choice.units.per_token.divisor * num_pairs <= kMostSlotVectors;
}

const char *name_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::kSlots:
      return "slots";
    case Kernel::kBlocks:
      return "blocks";
    case Kernel::kBulk:
      return "bulk";
    case Kernel::kVectors:
      return "vectors";
    case Kernel::kRemap:
      return "remap";
    case Kernel::kTile:
      return "tile";
    case Kernel::kConvert:
      return "convert";
    case Kernel::kQuantize:
      return "quantize";
    case Kernel::kUnits:
      return "units";
    case Kernel::kAffine:
      return "affine";
    case Kernel::kChannels:
      return "channels";
    case Kernel::kFp4:
      return "fp4";
    case Kernel::kGeneric:
      break;
  }
  return "generic";
}

uint32_t items_per_block(Kernel kernel) {
  return kernel == Kernel::kTile || kernel == Kernel::kBlocks || kernel == Kernel::kSlots ? 1
                                                                                          : kWarps;
}

void cut(const Choice &choice, Common *common) {
  const Units &units = choice.units;
  common->num_rows = FastDiv(static_cast<uint32_t>(common->rows.count));
  if (choice.kernel == Kernel::kChannels) {  // an item is a part of a block, which is not cut
    common->tokens_per_chunk = choice.run_tokens;
    common->units_per_part = 1;
    common->parts = units.per_token;
    common->chunks =
        static_cast<uint32_t>(common->rows.count * most_blocks(*common, choice.run_tokens));
    return;
  }
  if (choice.kernel == Kernel::kSlots) {  // an item is as many vectors as a block has threads
    const uint64_t vectors = common->rows.uniform_len * units.per_token.divisor;
    common->parts = FastDiv(1);
    common->chunks = static_cast<uint32_t>((vectors - 1) / kThreads + 1);
    return;
  }
  const uint64_t rows = common->rows.count, pairs = common->num_pairs;
  const uint64_t tokens = std::min(rows * common->row_bound, kMostItems) * pairs;
  uint32_t parts = 1, per_item = units.per_token.divisor;
  common->tokens_per_chunk = 1;
  switch (choice.kernel) {
    case Kernel::kBlocks:
    case Kernel::kBulk: {
      const bool bulk = choice.kernel == Kernel::kBulk;
      const uint64_t run_bytes = run_vectors(choice) * kVectorBytes;
      const uint64_t bytes = std::clamp(tokens / choice.run_tokens * run_bytes / kChunksWanted,
                                        kLeastBytes, bulk ? kMostBulkBytes : kMostBytes);
      const uint64_t most_runs = (bulk ? kWarp : kThreads) / choice.run_tokens;
      const uint64_t runs = std::clamp<uint64_t>(bytes / run_bytes, 1, most_runs);
      common->tokens_per_chunk = static_cast<uint32_t>(runs) * choice.run_tokens;
      per_item = static_cast<uint32_t>(run_bytes / kVectorBytes);
      if (!bulk) parts = static_cast<uint32_t>((run_bytes - 1) / bytes + 1);
      break;
    }
    case Kernel::kRemap: {
      const PlanePair &shape = choice.shape;
      const bool both = is_token_inner(shape.src, shape.head_dim, choice.unit_bytes) &&
                        is_token_inner(shape.dst, shape.head_dim, choice.unit_bytes);
      const uint32_t most_tokens = both ? kWarp : kTokensPerRemap;
      uint32_t &chunk = common->tokens_per_chunk;
      while (chunk < most_tokens && chunk < common->row_bound) chunk *= 2;
      const uint64_t most_parts = (units.per_token.divisor - 1) / (kWarp / chunk) + 1;
      parts = static_cast<uint32_t>(
          std::clamp<uint64_t>(kWarpsWanted / ((tokens - 1) / chunk + 1), 1, most_parts));
      break;
    }
    case Kernel::kTile: {
      common->tokens_per_chunk = kTileBytes / choice.unit_bytes;
      const uint32_t heads = choice.shape.num_heads, per_head = units.per_head.divisor;
      const uint64_t tiles = (tokens - 1) / common->tokens_per_chunk + 1;
      uint32_t per_part = per_head;  // an even share of a head that is still whole vectors
      while (tiles * heads * (per_head / per_part) < kTilesWanted &&
             per_part % (2 * kVectorBytes) == 0) {
        per_part /= 2;
      }
      parts = heads * (per_head / per_part);
      if (per_part < per_head) break;
      // Heads that share what finding the tokens costs
      parts = 1;
      while (heads % parts || (parts < heads && tiles * parts < kChunksWanted)) ++parts;
      break;
    }
    case Kernel::kConvert:
    case Kernel::kQuantize: {  // a warp takes what it holds at once of some tokens
      const uint32_t most = (units.per_token.divisor - 1) / kWarp + 1;
      parts = most;
      if (choice.kernel == Kernel::kQuantize) {
        const uint32_t heads = choice.shape.num_heads;
        const uint32_t lanes = least_lanes(units.per_head.divisor, units.bytes);
        parts = (heads - 1) / std::max(kWarp / lanes, 1u) + 1;
        while (2 * parts <= most && 2 * parts * tokens <= kWarpsWanted) parts *= 2;
      }
      uint32_t &chunk = common->tokens_per_chunk;
      while (chunk < kWarp && chunk < common->row_bound && tokens * parts > kWarpsWanted * chunk)
        chunk *= 2;
      break;
    }
    default:
      while (common->tokens_per_chunk < kTokensPerWarp &&
             tokens >= 2 * common->tokens_per_chunk * kWarpsWanted) {
        common->tokens_per_chunk *= 2;
      }
      if (tokens < kWarpsWanted) {
        const uint32_t most = (units.per_token.divisor - 1) / kWarp + 1;
        parts = static_cast<uint32_t>(
            std::min<uint64_t>(kWarpsWanted / std::max<uint64_t>(tokens, 1), most));
      }
  }
  parts = static_cast<uint32_t>(std::min<uint64_t>(parts, kMostItems / rows));
  common->units_per_part = (per_item - 1) / parts + 1;
  if (choice.kernel == Kernel::kConvert && units.elements == kWideUnit)  // pairs stay whole
    common->units_per_part += common->units_per_part % 2;
  if (choice.kernel == Kernel::kQuantize) {  // heads stay whole
    const uint32_t per_head = units.per_head.divisor;
    common->units_per_part = ((common->units_per_part - 1) / per_head + 1) * per_head;
  }
  common->parts = FastDiv((per_item - 1) / common->units_per_part + 1);
  const uint64_t most_chunks = kMostItems / (rows * common->parts.divisor);
  while ((common->row_bound - 1) / common->tokens_per_chunk + 1 > most_chunks)
    common->tokens_per_chunk *= 2;
  const uint64_t chunks_of_row = (common->row_bound - 1) / common->tokens_per_chunk + 1;
  common->chunks = static_cast<uint32_t>(rows * chunks_of_row);
}

}  // namespace kvx::cuda
