// Handlers of the window noun: exchanges between shards through memory that their peers write.
#include "../kernels/window.h"

#include "buffers.h"

namespace jaxsok {
namespace {

/// Sends equal parts of an array to the shards, and receives their parts.
ffi::Error Exchange(Call& call) {
  const auto window = call.Attribute<int32_t>("window");
  const Array lines = call.Operand("lines");
  ReadMeeting(call);
  const Array received = call.Result("received");
  call.Require(received.num_bytes() == lines.num_bytes(), "received", "got ", received.num_bytes(), " bytes, wanted ",
               lines.num_bytes());
  return call.Launch([&](Stream stream) -> LaunchError {
    WindowExchange exchange(stream, window, call.device(), kCallExchange, lines.num_bytes());
    if (exchange.error() != nullptr) return exchange.error();
    return exchange.Done(LaunchWindowExchange(stream, exchange, lines.as<void>(),
                                              lines.num_bytes() / exchange.num_shards(), received.as<void>()));
  });
}

/// Sends each shard its lines of an array, and receives lines from all shards.
ffi::Error Lines(Call& call) {
  const auto window = call.Attribute<int32_t>("window");
  const Array lines = call.Operand("lines", ffi::U32, {-1, -1});
  call.Require(lines.size(1) == 2 || lines.size(1) == 4, "lines", "got ", lines.size(1), " words, wanted 2 or 4");
  const Array starts = call.Operand("starts", ffi::S32, {-1});
  const Array digest = call.Operand("digest", ffi::U32, {1, 2});
  const int64_t num_shards = starts.size(0) - 1;
  const Array offsets = call.Operand("offsets", ffi::S32, {num_shards, -1});
  ReadMeeting(call);
  const Array received = call.Result("received", ffi::U32, {-1, lines.size(1)});
  const Array offsets_received = call.Result("offsets_received", ffi::S32, {num_shards, offsets.size(1)});
  const Array load = call.Result("load", ffi::S32, {1, 2});
  const Array digest_of_all = call.Result("digest_of_all", ffi::U32, {1, 2});
  call.Require(num_shards > 0 && received.size(0) % num_shards == 0, "received", "got ", received.size(0),
               " lines, wanted equal parts of ", num_shards, " shards");
  return call.Launch([&](Stream stream) -> LaunchError {
    const LinesToSend send = {
        lines.as<void>(),      lines.size(1) * 4,     lines.size(0),   starts.as<int32_t>(),
        digest.as<uint32_t>(), offsets.as<int32_t>(), offsets.size(1), received.size(0) / num_shards};
    const auto shards = static_cast<int32_t>(num_shards);
    WindowExchange exchange(stream, window, call.device(), kCallLines, shards * send.PartBytes(shards));
    if (exchange.error() != nullptr) return exchange.error();
    if (exchange.num_shards() != num_shards) return "starts: not those of the window's shards";
    return exchange.Done(LaunchWindowLines(
        stream, exchange, send,
        {received.as<void>(), offsets_received.as<int32_t>(), load.as<int32_t>(), digest_of_all.as<uint32_t>()}));
  });
}

/// Adds numbers of all shards, in order of place.
ffi::Error Sum(Call& call) {
  const auto window = call.Attribute<int32_t>("window");
  const Array words = call.Operand("words", ffi::S32, {-1});
  ReadMeeting(call);
  const Array sums = call.Result("sums", ffi::S32, {words.size(0)});
  return call.Launch([&](Stream stream) {
    return LaunchWindowSum(stream, window, call.device(), words.as<int32_t>(), words.size(0), sums.as<int32_t>());
  });
}

/// Waits on the host until the threads of all devices run this program. Its result has no content: the calls that
/// exchange take it, so that they come after it.
ffi::Error Meet(Call& call) {
  const auto window = call.Attribute<int32_t>("window");
  call.Operand("nothing", ffi::U32, {1});
  call.Result("met", ffi::U32, {1});
  return call.Launch([&](Stream) { return MeetThreads(window, call.device()); });
}

}  // namespace

JAXSOK_DEFINE_WINDOW_HANDLER(JaxsokWindowExchange, "window_exchange", Exchange);
JAXSOK_DEFINE_WINDOW_HANDLER(JaxsokWindowLines, "window_lines", Lines);
JAXSOK_DEFINE_EAGER_HANDLER(JaxsokWindowMeet, "window_meet", Meet);
JAXSOK_DEFINE_WINDOW_HANDLER(JaxsokWindowSum, "window_sum", Sum);

}  // namespace jaxsok
