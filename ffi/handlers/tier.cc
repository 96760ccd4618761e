// Handlers of the tier noun: bring, peek, return, flush.
#include "../kernels/tier.h"

#include "buffers.h"

namespace jaxsok {
namespace {

/// Reads host slabs and the arrays of a tier; `changes`: they all come back.
TierView ReadTier(Call& call, bool changes = true) {
  TierView tier{};
  const auto next = [&](const char* name, ffi::DataType dtype, Shape shape) {
    return changes ? call.InPlace(name, dtype, shape) : call.Operand(name, dtype, shape);
  };
  const auto num_slabs = call.Attribute<int32_t>("num_slabs"), num_states = call.Attribute<int32_t>("num_states");
  call.Require(num_states >= 0 && num_states <= kMaxStates, "num_states", "got ", num_states, ", wanted 0 to ",
               +kMaxStates);
  SlabReader slabs(call, num_slabs);
  tier.host_bytes = slabs.Read(
      "host", [&] { return next("host", ffi::U8, {-1, -1}); },
      [&](int s, const Array& slab) { tier.host.data[s] = slab.as<uint8_t>(); });
  const int64_t words = slabs.Read(
      "places", [&] { return next("places", ffi::U32, {-1, 1}); },
      [&](int s, const Array& slab) { tier.places.data[s] = slab.as<uint32_t>(); });
  call.Require(words == 1, "places", "got ", words, " words a row, wanted 1");
  tier.starts = slabs.starts();
  tier.capacity = slabs.capacity();

  const Array rows = changes ? call.InPlace("rows") : call.Operand("rows");
  const std::optional<RowDtype> dtype = RowDtypeOf(rows.dtype());
  call.Require(dtype.has_value() && rows.dims().size() == 2, "rows",
               "wanted float32, bfloat16 or float16 [slots, dim]");
  tier.row_dtype = dtype.value_or(kRowDtypeFloat32);
  tier.rows = rows.as<void>();
  tier.dim = static_cast<int32_t>(rows.size(1));
  const int64_t num_lines = rows.size(0);
  call.Require(num_lines >= 1 && num_lines < kMostSlots, "rows", "got ", num_lines, " slots, wanted 1 to ",
               kMostSlots - 1);
  tier.num_lines = static_cast<uint32_t>(num_lines);
  tier.states.num_states = call.failed() ? 0 : num_states;
  int64_t begin = (tier.RowBytes() + 3) / 4 * 4, num_state_words = 0;
  for (int32_t k = 0; k < tier.states.num_states; ++k) {
    const Array state = next("states", ffi::F32, {num_lines, -1});
    tier.states.data[k].data[0] = state.as<float>();
    tier.states.width[k] = static_cast<int32_t>(state.size(1));
    tier.state_begin[k] = begin + num_state_words * 4;
    num_state_words += tier.states.width[k];
  }
  const int64_t wanted_bytes = HostRecordBytes(tier.RowBytes(), num_state_words);
  call.Require(tier.host_bytes == wanted_bytes, "host", "got ", tier.host_bytes, " bytes a row, wanted ", wanted_bytes);
  tier.owners = next("owners", ffi::U32, {num_lines, 4}).as<Record>();
  tier.last_use = next("last_use", ffi::U32, {num_lines}).as<uint32_t>();
  tier.counters = next("counters", ffi::U32, {kNumTierCounters}).as<uint32_t>();
  next("order", ffi::U32, {kNumCounters});
  return tier;
}

/// Reads staged rows, which are operands or results.
template <typename Next>
void ReadStaged(Call& call, TierView& tier, const Next& next) {
  const Array rows = next("staged_rows");
  const int64_t num_staged = rows.size(0);
  call.CheckShape("staged_rows", rows.dims(), {num_staged, tier.dim});
  tier.staged_rows = rows.as<void>();
  for (int32_t k = 0; k < tier.states.num_states; ++k) {
    const Array state = next("staged_states");
    call.CheckShape("staged_states", state.dims(), {num_staged, tier.states.width[k]});
    tier.states.data[k].data[1] = state.as<float>();
  }
  const Array owners = next("staged_owners");
  call.CheckShape("staged_owners", owners.dims(), {num_staged, 4});
  tier.staged_owners = owners.as<Record>();
  tier.num_staged = static_cast<uint32_t>(num_staged);
}

struct Asked {
  TierView tier;
  Array row_ids, slots;
};

/// Reads the rows that a call asks for, and where their slots and what is staged go.
Asked ReadAsked(Call& call, bool changes) {
  Asked asked{ReadTier(call, changes), {}, {}};
  TierView& tier = asked.tier;
  const auto num_slots = call.Attribute<int32_t>("num_slots");
  call.Require(num_slots >= 0 && static_cast<uint32_t>(num_slots) <= tier.num_lines, "num_slots", "got ", num_slots,
               ", wanted 0 to ", tier.num_lines);
  tier.num_slots = static_cast<uint32_t>(num_slots);
  SlabReader slabs(call, tier.starts.num_slabs);
  const int64_t words = slabs.Read(
      "records", [&] { return call.Operand("records", ffi::U32, {-1, 4}); },
      [&](int s, const Array& slab) { tier.records.data[s] = slab.as<Record>(); });
  call.Require(words == 4 && slabs.capacity() == tier.capacity, "records", "got ", slabs.capacity(), " rows, wanted ",
               tier.capacity);
  const Array tables = call.Operand("tables", ffi::U32, {-1, kNumTableWords});
  tier.tables = tables.as<uint32_t>();
  tier.num_tables = static_cast<int32_t>(tables.size(0));
  tier.seed = call.Operand("seed", ffi::U32, {2}).as<uint32_t>();
  asked.row_ids = call.Operand("row_ids", ffi::U32, {-1});
  const int64_t n = asked.row_ids.size(0);
  call.Require(n < kMostSlots, "row_ids", "got ", n, ", wanted below ", kMostSlots);
  ReadInitial(call, tier.states);
  asked.slots = call.Result("slots", ffi::U32, {n});
  ReadStaged(call, tier, [&](const char* name) { return call.Result(name); });
  const int64_t wanted = changes ? std::max<int64_t>(0, n - num_slots) : n;
  call.Require(tier.num_staged >= wanted, "staged_rows", "got ", tier.num_staged, " slots, wanted ", wanted);
  return asked;
}

/// Gives every row of a call a slot.
ffi::Error Bring(Call& call) {
  const Asked asked = ReadAsked(call, true);
  const int64_t n = asked.row_ids.size(0);
  void* workspace = call.Workspace(BringWorkspaceBytes(n, asked.tier.num_slots));
  return call.Launch([&](Stream stream) {
    return LaunchBring(stream, asked.tier, asked.row_ids.as<uint32_t>(), n, asked.slots.as<uint32_t>(), workspace);
  });
}

/// The same, and changes nothing.
ffi::Error Peek(Call& call) {
  const Asked asked = ReadAsked(call, false);
  return call.Launch([&](Stream stream) {
    return LaunchPeek(stream, asked.tier, asked.row_ids.as<uint32_t>(), asked.row_ids.size(0),
                      asked.slots.as<uint32_t>());
  });
}

/// Writes staged rows to host memory.
ffi::Error Return(Call& call) {
  TierView tier = ReadTier(call);
  ReadStaged(call, tier, [&](const char* name) { return call.Operand(name); });
  return call.Launch([&](Stream stream) { return LaunchReturn(stream, tier); });
}

/// Writes the rows of the cache to host memory.
ffi::Error Flush(Call& call) {
  const TierView tier = ReadTier(call);
  return call.Launch([&](Stream stream) { return LaunchFlush(stream, tier); });
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokTierBring, "tier_bring", Bring);
JAXSOK_DEFINE_HANDLER(JaxsokTierPeek, "tier_peek", Peek);
JAXSOK_DEFINE_HANDLER(JaxsokTierReturn, "tier_return", Return);
JAXSOK_DEFINE_HANDLER(JaxsokTierFlush, "tier_flush", Flush);

}  // namespace jaxsok

extern "C" __attribute__((visibility("default"))) int64_t JaxsokBringWorkspaceBytes(int64_t num_keys,
                                                                                    int64_t num_slots) {
  return jaxsok::BringWorkspaceBytes(num_keys, num_slots);
}
