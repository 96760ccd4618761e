// Handlers of the tier noun: bring, write and read, their versions ahead of a call, wait, and peek.
#include "../kernels/tier.h"

#include "buffers.h"

namespace jaxsok {
namespace {

/// Reads the arrays of one kind of the tier, from operands that are also results or not.
class TierReader {
 public:
  TierReader(Call& call, bool changes) : call_(call), changes_(changes) {
    const auto num_slabs = call.Attribute<int32_t>("num_slabs");
    tier_.states.num_states = call.Attribute<int32_t>("num_states");
    const int32_t num_states = tier_.states.num_states;
    call.Require(num_states >= 0 && num_states <= kMaxStates, "num_states", "got ", num_states, ", wanted 0 to ",
                 +kMaxStates);
    call.Require(num_slabs >= 1 && num_slabs <= kMaxSlabs, "num_slabs", "got ", num_slabs, ", wanted 1 to ", kMaxSlabs);
    num_slabs_ = call.failed() ? 0 : num_slabs;
    if (call.failed()) tier_.states.num_states = 0;
  }

  TierView& tier() { return tier_; }

  void ReadPlaces() {
    const int64_t words = ReadSlabs("places", ffi::U32, changes_,
                                    [&](int s, const Array& slab) { tier_.places.data[s] = slab.as<uint32_t>(); });
    call_.Require(words == 1, "places", "got ", words, " words a row, wanted 1");
  }
  void ReadHomes() {
    const int64_t words = ReadSlabs("homes", ffi::U32, changes_,
                                    [&](int s, const Array& slab) { tier_.homes.data[s] = slab.as<uint32_t>(); });
    call_.Require(words == 2, "homes", "got ", words, " words a row, wanted 2");
  }
  void ReadRecords() {
    const int64_t words = ReadSlabs("records", ffi::U32, false,
                                    [&](int s, const Array& slab) { tier_.records.data[s] = slab.as<Record>(); });
    call_.Require(words == 4, "records", "got ", words, " words a row, wanted 4");
  }
  /// Reads host slabs that do not change.
  void ReadHostAddresses() { ReadHostSlabs(false); }
  /// Reads host slabs, after the rows and states that determine the bytes of a record.
  void ReadHost(bool changes) {
    ReadHostSlabs(changes);
    const int64_t wanted = HostRecordBytes(tier_.RowBytes(), num_state_words_);
    call_.Require(tier_.host_bytes == wanted, "host", "got ", tier_.host_bytes, " bytes a row, wanted ", wanted);
  }
  void ReadRows() {
    const Array rows = changes_ ? call_.InPlace("rows") : call_.Operand("rows");
    const std::optional<RowDtype> dtype = RowDtypeOf(rows.dtype());
    call_.Require(dtype.has_value() && rows.dims().size() == 2, "rows", "wanted float32, bfloat16 or float16 [_, dim]");
    tier_.row_dtype = dtype.value_or(kRowDtypeFloat32);
    tier_.rows = rows.as<void>();
    tier_.dim = static_cast<int32_t>(rows.size(1));
    TakeNumLines(rows.size(0));
    for (int32_t k = 0; k < tier_.states.num_states; ++k) {
      const Array state = Next("states", ffi::F32, {tier_.num_lines, -1});
      tier_.states.data[k].data[0] = state.as<float>();
      tier_.states.width[k] = static_cast<int32_t>(state.size(1));
      tier_.state_begin[k] = (tier_.RowBytes() + 3) / 4 * 4 + num_state_words_ * 4;
      num_state_words_ += tier_.states.width[k];
    }
  }
  void ReadOwners() {
    const Array owners = Next("owners", ffi::U32, {-1, 4});
    TakeNumLines(owners.size(0));
    tier_.owners = owners.as<Record>();
  }
  void ReadTierCounters() { tier_.counters = Next("counters", ffi::U32, {kNumTierCounters}).as<uint32_t>(); }
  void ReadClocks() {
    tier_.last_use = Next("last_use", ffi::U32, {tier_.num_lines}).as<uint32_t>();
    tier_.priority = Next("priority", ffi::U32, {tier_.num_lines}).as<uint32_t>();
    const Array foreseen = Next("foreseen", ffi::U32, {-1, 4});
    tier_.foreseen = foreseen.as<Foreseen>();
    tier_.most_foreseen = foreseen.size(0);
    ReadTierCounters();
    Next("order", ffi::U32, {kNumCounters});
  }
  void ReadNumSlots() {
    const auto num_slots = call_.Attribute<int32_t>("num_slots");
    call_.Require(num_slots >= 0 && static_cast<uint32_t>(num_slots) <= tier_.num_lines, "num_slots", "got ", num_slots,
                  ", wanted 0 to ", tier_.num_lines);
    tier_.num_slots = static_cast<uint32_t>(num_slots);
  }
  void ReadInitialRows() {
    const Array tables = call_.Operand("tables", ffi::U32, {-1, kNumTableWords});
    tier_.tables = tables.as<uint32_t>();
    tier_.num_tables = static_cast<int32_t>(tables.size(0));
    tier_.seed = call_.Operand("seed", ffi::U32, {2}).as<uint32_t>();
    ReadInitial(call_, tier_.states);
  }
  void ReadStagedOwners(bool is_result) {
    const Array owners = is_result ? call_.Result("staged_owners", ffi::U32, {-1, 4})
                                   : call_.Operand("staged_owners", ffi::U32, {-1, 4});
    tier_.staged_owners = owners.as<Record>();
    tier_.num_staged = static_cast<uint32_t>(owners.size(0));
  }
  void ReadStagedRows() {
    const Array rows = call_.Result("staged_rows");
    call_.CheckShape("staged_rows", rows.dims(), {tier_.num_staged, tier_.dim});
    tier_.staged_rows = rows.as<void>();
    for (int32_t k = 0; k < tier_.states.num_states; ++k) {
      const Array state = call_.Result("staged_states", ffi::F32, {tier_.num_staged, tier_.states.width[k]});
      tier_.states.data[k].data[1] = state.as<float>();
    }
  }

 private:
  Array Next(const char* name, ffi::DataType dtype, Shape shape) {
    return changes_ ? call_.InPlace(name, dtype, shape) : call_.Operand(name, dtype, shape);
  }
  template <typename Take>
  int64_t ReadSlabs(const char* name, ffi::DataType dtype, bool changes, const Take& take) {
    SlabReader slabs(call_, num_slabs_);
    const auto next = [&] {
      return changes ? call_.InPlace(name, dtype, {-1, -1}) : call_.Operand(name, dtype, {-1, -1});
    };
    const int64_t width = slabs.Read(name, next, take);
    const bool is_same = tier_.capacity == 0 || tier_.capacity == slabs.capacity();
    call_.Require(is_same, name, "got ", slabs.capacity(), " rows, wanted ", tier_.capacity);
    tier_.starts = slabs.starts();
    tier_.capacity = slabs.capacity();
    return width;
  }
  void ReadHostSlabs(bool changes) {
    tier_.host_bytes =
        ReadSlabs("host", ffi::U8, changes, [&](int s, const Array& slab) { tier_.host.data[s] = slab.as<uint8_t>(); });
    call_.Require(tier_.host_bytes > 0, "host", "got rows of 0 bytes, wanted some");
    if (!call_.failed()) tier_.area = AreaOf(tier_.host.data[0]);
  }
  void TakeNumLines(int64_t num_lines) {
    call_.Require(num_lines < kMostSlots, "slots", "got ", num_lines, ", wanted at most ", kMostSlots - 1);
    const bool is_same = tier_.num_lines == 0 || tier_.num_lines == num_lines;
    call_.Require(is_same, "slots", "got ", num_lines, ", wanted ", tier_.num_lines);
    tier_.num_lines = static_cast<uint32_t>(num_lines);
  }

  Call& call_;
  bool changes_;
  int32_t num_slabs_ = 0;
  int64_t num_state_words_ = 0;
  TierView tier_{};
};

void RequireStaged(Call& call, const TierView& tier, int64_t wanted) {
  call.Require(tier.num_staged >= wanted, "staged_owners", "got ", tier.num_staged, " slots, wanted ", wanted);
}

/// The operands of a call that gives rows slots, or predicts one: only the addresses of host slabs.
struct Bringing {
  Bringing(Call& call, bool is_ahead) : reader(call, true) {
    reader.ReadPlaces();
    reader.ReadHomes();
    reader.ReadOwners();
    reader.ReadClocks();
    reader.ReadRecords();
    reader.ReadHostAddresses();
    reader.ReadNumSlots();
    call.InPlace("store_counters", ffi::U32, {kNumCounters});  // a call that changes records runs after this one
    row_ids = call.Operand("row_ids", ffi::U32, {-1});
    n = row_ids.size(0);
    call.Require(n < kMostSlots, "row_ids", "got ", n, ", wanted below ", kMostSlots);
    if (!is_ahead) {
      known.slots = call.Operand("known_slots", ffi::U32, {n}).as<uint32_t>();
      known.stamp = call.Operand("known_stamp", ffi::U32, {kStampWords}).as<SlotsStamp>();
    }
    list.slots = call.Result("slots", ffi::U32, {n}).as<uint32_t>();
    list.stamp = call.Result("stamp", ffi::U32, {kStampWords}).as<SlotsStamp>();
    if (!is_ahead) {
      reader.ReadStagedOwners(true);
      RequireStaged(call, reader.tier(), n - reader.tier().num_slots);
    }
    moves.leaving = call.Result("leaving", ffi::U32, {n, 4}).as<Move>();
    moves.coming = call.Result("coming", ffi::U32, {n, 4}).as<Move>();
    moves.counts = call.Result("counts", ffi::U32, {kNumMoveCounts}).as<uint32_t>();
    workspace = call.Workspace(BringWorkspaceBytes(n));
  }

  TierReader reader;
  Array row_ids;
  int64_t n;
  SlotList known{}, list{};
  Moves moves{};
  void* workspace;
};

/// Gives every row of a call a slot, and lists the required moves.
ffi::Error Bring(Call& call) {
  Bringing b(call, false);
  return call.Launch([&](Stream stream) {
    return LaunchBring(stream, b.reader.tier(), b.row_ids.as<uint32_t>(), b.n, b.known, b.list, b.moves, b.workspace);
  });
}

/// Lists the moves that a call would require.
ffi::Error BringAhead(Call& call) {
  Bringing b(call, true);
  return call.Launch([&](Stream stream) {
    return LaunchBringAhead(stream, b.reader.tier(), b.row_ids.as<uint32_t>(), b.n, b.list, b.moves, b.workspace);
  });
}

/// The operands that name moves.
struct Moving {
  Moving(Call& call, const char* name)
      : moves(call.Operand(name, ffi::U32, {-1, 4})), counts(call.Operand("counts", ffi::U32, {kNumMoveCounts})) {}
  Array moves, counts;
};

/// Writes the rows that leave to one slab, with `launch`.
template <typename Launcher>
ffi::Error WriteWith(Call& call, const Launcher& launch) {
  TierReader reader(call, false);
  reader.ReadRows();
  const Moving leaving(call, "leaving");
  const auto begin = call.Attribute<int32_t>("begin");
  reader.ReadHost(true);
  return call.Launch([&](Stream stream) {
    return launch(stream, reader.tier(), leaving.moves.as<Move>(), leaving.counts.as<uint32_t>(), leaving.moves.size(0),
                  static_cast<uint32_t>(begin));
  });
}
ffi::Error Write(Call& call) { return WriteWith(call, LaunchWrite); }
ffi::Error WriteAhead(Call& call) { return WriteWith(call, LaunchWriteAhead); }

/// Reads the rows that come, or initializes them.
ffi::Error Read(Call& call) {
  TierReader reader(call, true);
  reader.ReadRows();
  reader.ReadHost(false);
  const Array owners = call.Operand("owners", ffi::U32, {reader.tier().num_lines, 4});
  reader.tier().owners = owners.as<Record>();
  reader.ReadStagedOwners(false);
  const Moving coming(call, "coming");
  reader.ReadInitialRows();
  reader.ReadStagedRows();
  return call.Launch([&](Stream stream) {
    return LaunchRead(stream, reader.tier(), coming.moves.as<Move>(), coming.counts.as<uint32_t>(),
                      coming.moves.size(0));
  });
}

/// Reads rows into memory that the library owns. The counters pass through it: what takes them comes after it.
ffi::Error ReadAhead(Call& call) {
  TierReader reader(call, true);
  reader.ReadTierCounters();
  reader.ReadHostAddresses();
  return call.Launch([&](Stream stream) { return LaunchReadAhead(stream, reader.tier()); });
}

/// Waits for rows on their way to host memory. Places pass through it, so that calls that read there come after it.
ffi::Error Wait(Call& call) {
  TierReader reader(call, true);
  reader.ReadPlaces();
  reader.ReadHostAddresses();
  return call.Launch([&](Stream stream) { return LaunchWait(stream, reader.tier()); });
}

/// Gives every position a slot with the numbers of its row; changes no state.
ffi::Error Peek(Call& call) {
  TierReader reader(call, false);
  reader.ReadPlaces();
  reader.ReadHomes();
  reader.ReadRows();
  reader.ReadHost(false);
  reader.ReadRecords();
  reader.ReadNumSlots();
  const Array row_ids = call.Operand("row_ids", ffi::U32, {-1});
  const int64_t n = row_ids.size(0);
  reader.ReadInitialRows();
  const Array slots = call.Result("slots", ffi::U32, {n});
  reader.ReadStagedOwners(true);
  RequireStaged(call, reader.tier(), n);
  reader.ReadStagedRows();
  return call.Launch([&](Stream stream) {
    return LaunchPeek(stream, reader.tier(), row_ids.as<uint32_t>(), n, slots.as<uint32_t>());
  });
}

}  // namespace

JAXSOK_DEFINE_HANDLER(JaxsokTierBring, "tier_bring", Bring);
JAXSOK_DEFINE_HANDLER(JaxsokTierWrite, "tier_write", Write);
JAXSOK_DEFINE_HANDLER(JaxsokTierRead, "tier_read", Read);
JAXSOK_DEFINE_HANDLER(JaxsokTierBringAhead, "tier_bring_ahead", BringAhead);
JAXSOK_DEFINE_EAGER_HANDLER(JaxsokTierWriteAhead, "tier_write_ahead", WriteAhead);
JAXSOK_DEFINE_EAGER_HANDLER(JaxsokTierReadAhead, "tier_read_ahead", ReadAhead);
JAXSOK_DEFINE_HANDLER(JaxsokTierWait, "tier_wait", Wait);
JAXSOK_DEFINE_HANDLER(JaxsokTierPeek, "tier_peek", Peek);

}  // namespace jaxsok

JAXSOK_VISIBLE int64_t JaxsokBringWorkspaceBytes(int64_t num_keys) { return jaxsok::BringWorkspaceBytes(num_keys); }
