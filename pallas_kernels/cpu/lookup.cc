// Lookups of drafts on CPUs: what followed the last tokens of a row where they occurred before, in the row itself or in
// finished answers. Drafts are exactly those that jaxserve/features/speculation works out with XLA, where the rules and the
// arrays are described. There a row is compared as a whole; here an occurrence ends at its first unequal token.
//
// Numbers in the arrays may be anything: they never lead out of an array.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "call.h"
#include "corpus.h"

namespace {

using namespace jaxserve;

constexpr int64_t kBlock = 64;      // tokens of a row that are compared with one token at once
constexpr int32_t kBeforeRow = -2;  // what lies before a row's first token: equal to nothing

// The known tokens of a row.
struct Row {
  const int32_t* tokens;
  int64_t length;

  int32_t Back(int64_t count) const { return count < length ? tokens[length - 1 - count] : kBeforeRow; }
};

struct Occurrence {
  int64_t end;    // position after it; a larger one is more recent
  int64_t at;     // where the next token lies,
  int64_t again;  // and where it goes on behind the last one of the list
};

// The occurrences of the longest match in a list of tokens.
struct Matches {
  const int32_t* tokens;
  int64_t size;     // of the list
  int64_t matched;  // tokens of the match
  std::vector<Occurrence> found;
};

struct Rule {
  const int32_t *limits, *needs;  // [depth + 1], [occurrences + 1]
  int64_t depth, most_needs, most_occurrences;
};

// What a thread works with, so that rows allocate nothing.
struct Scratch {
  struct Vote {
    int32_t token;
    int64_t votes, latest;
  };
  Matches row, corpus;
  std::vector<Vote> votes;
  std::vector<const int32_t*> buckets;  // of the row's last n-grams, by level
};

// The last occurrences of the longest match in the row; it goes on at its end as if its text had their distance as a
// period.
void FindInRow(const Row& row, const Rule& rule, Matches& matches) {
  matches.tokens = row.tokens, matches.size = row.length, matches.matched = 0;
  matches.found.clear();
  const int32_t last = row.tokens[row.length - 1];
  auto compare = [&](int64_t end) {
    int64_t count = 1, most = std::min(rule.depth, end);
    while (count < most && row.tokens[end - 1 - count] == row.tokens[row.length - 1 - count]) ++count;
    if (count > matches.matched) matches.matched = count, matches.found.clear();
    if (count == matches.matched && static_cast<int64_t>(matches.found.size()) < rule.most_occurrences)
      matches.found.push_back({end, end, end});
  };
  for (int64_t end = row.length - 1; end > 0;) {
    int64_t first = std::max<int64_t>(end - kBlock, 0);
    int32_t is_there = 0;
    if (end - first == kBlock)
      for (int64_t i = 0; i < kBlock; ++i) is_there |= row.tokens[first + i] == last;
    if (is_there || end - first < kBlock)
      for (int64_t i = end; i > first; --i)
        if (row.tokens[i - 1] == last) compare(i);
    if (matches.matched == rule.depth && static_cast<int64_t>(matches.found.size()) == rule.most_occurrences) return;
    end = first;
  }
}

// Finds the buckets of the row's last n-grams, and asks for their memory. Those longer than the row are nowhere.
void FindBuckets(const Corpus& corpus, const Row& row, const uint32_t* salt, std::vector<const int32_t*>& buckets) {
  buckets.clear();
  uint32_t state = 0, power = kBase;
  int64_t back = 0;
  for (int64_t level = 0; level < corpus.num_levels && corpus.levels[level] <= row.length; ++level) {
    for (; back < corpus.levels[level]; ++back, power *= kBase)
      state += power * (static_cast<uint32_t>(row.Back(back)) + kBase);
    buckets.push_back(corpus.FindBucket(level, state, salt));
    __builtin_prefetch(buckets.back());
  }
}

// The occurrences of the longest match in answers of this salt, if it is longer than `matches.matched`.
void FindInCorpus(const Corpus& corpus, const Row& row, const uint32_t* salt, int64_t depth,
                  const std::vector<const int32_t*>& buckets, Matches& matches) {
  matches.tokens = corpus.tokens, matches.size = corpus.ring;
  matches.found.clear();
  for (size_t level = 0; level < buckets.size(); ++level)
    for (int64_t way = 0; way < corpus.ways; ++way) {
      const int64_t end = buckets[level][way];
      if (end <= corpus.oldest) continue;
      const int64_t last = (end - 1) % corpus.ring, most = std::min(depth, end - corpus.oldest);
      int64_t count = 0;
      for (int64_t slot = last; count < most && corpus.tokens[slot] == row.Back(count); ++count)
        slot = slot ? slot - 1 : corpus.ring - 1;
      if (count < corpus.levels[level]) continue;  // another n-gram has the same bucket
      if (count < matches.matched || (count == matches.matched && matches.found.empty())) continue;
      const uint32_t* owner = corpus.salts + 2 * last;
      if (owner[0] != salt[0] || owner[1] != salt[1]) continue;
      if (count > matches.matched) matches.matched = count, matches.found.clear();
      auto is_same = [&](const Occurrence& other) { return other.end == end; };
      if (std::none_of(matches.found.begin(), matches.found.end(), is_same))
        matches.found.push_back({end, last + 1 < corpus.ring ? last + 1 : 0, 0});
    }
}

// Writes, at each place, the token that most occurrences have among those that had all tokens before it; of equally many
// the most recent decides. A token that fewer than `need` have ends the drafts, and so does the end of all answers.
void FollowMost(Matches& matches, std::vector<Scratch::Vote>& votes, int64_t need, int64_t limit, int32_t* drafts) {
  std::vector<Occurrence>& alike = matches.found;
  for (int64_t place = 0; place < limit; ++place) {
    votes.clear();
    for (const Occurrence& each : alike) {
      int32_t token = matches.tokens[each.at];
      if (token < 0) continue;
      auto vote = std::find_if(votes.begin(), votes.end(), [&](const auto& other) { return other.token == token; });
      if (vote == votes.end()) vote = votes.insert(vote, {token, 0, 0});
      ++vote->votes, vote->latest = std::max(vote->latest, each.end);
    }
    const Scratch::Vote* best = nullptr;
    for (const Scratch::Vote& vote : votes)
      if (!best || vote.votes > best->votes || (vote.votes == best->votes && vote.latest > best->latest)) best = &vote;
    if (!best || best->votes < need) return;
    drafts[place] = best->token;
    std::erase_if(alike, [&](const Occurrence& each) { return matches.tokens[each.at] != best->token; });
    for (Occurrence& each : alike)
      if (++each.at == matches.size) each.at = each.again;
  }
}

// The drafts of one row, at most `limit`; what is not drafted is left as it is.
void LookUp(const Row& row, const Rule& rule, const Corpus* corpus, const uint32_t* salt, int64_t limit,
            int32_t* drafts) {
  thread_local Scratch scratch;
  if (corpus) FindBuckets(*corpus, row, salt, scratch.buckets);
  FindInRow(row, rule, scratch.row);
  Matches* matches = &scratch.row;
  if (corpus && matches->matched < rule.depth) {
    scratch.corpus.matched = matches->matched;
    FindInCorpus(*corpus, row, salt, rule.depth, scratch.buckets, scratch.corpus);
    if (!scratch.corpus.found.empty()) matches = &scratch.corpus;
  }
  if (matches->matched == 0) return;
  const int64_t found = std::min<int64_t>(matches->found.size(), rule.most_needs);
  limit = std::min<int64_t>(limit, rule.limits[matches->matched]);
  FollowMost(*matches, scratch.votes, rule.needs[found], limit, drafts);
}

enum { kHistory, kRowIds, kLengths, kLimits, kNeeds, kNumbers, kNumArgs };

const char* Call(const XLA_FFI_CallFrame* frame) {  // returns what is wrong, or null
  const bool has_corpus = frame->args.size == int{kNumArgs} + int{kNumCorpusArgs};
  if ((frame->args.size != kNumArgs && !has_corpus) || frame->rets.size != 1) return "wrong number of arrays";
  for (int i = 0; i < kNumArgs; ++i)
    if (Argument(frame, i).dtype != XLA_FFI_DataType_S32) return "all arrays but salts must be int32";
  const int32_t *history = Ints(frame, kHistory), *row_ids = Ints(frame, kRowIds), *lengths = Ints(frame, kLengths);
  const int64_t num_rows = Argument(frame, kHistory).dims[0], max_len = Argument(frame, kHistory).dims[1];
  const int64_t count = Argument(frame, kRowIds).dims[0], num_drafts = Result(frame, 0).dims[1];
  int32_t* drafts = static_cast<int32_t*>(Result(frame, 0).data);
  Rule rule{};
  rule.limits = Ints(frame, kLimits), rule.needs = Ints(frame, kNeeds);
  rule.depth = Argument(frame, kLimits).dims[0] - 1, rule.most_needs = Argument(frame, kNeeds).dims[0] - 1;
  rule.most_occurrences = Ints(frame, kNumbers)[0];
  const int32_t no_draft = Ints(frame, kNumbers)[1];
  if (rule.depth < 1 || rule.most_needs < 1 || rule.most_occurrences < 1) return "the rule allows no match";
  Corpus corpus{};
  if (const char* fault = has_corpus ? ReadCorpus(frame, kNumArgs, corpus) : nullptr) return fault;

  std::fill(drafts, drafts + count * num_drafts, no_draft);
  for (int64_t i = 0; i < count; ++i) {  // on this thread: to wake another takes as long as several rows
    if (lengths[i] <= 0 || lengths[i] >= max_len) continue;
    const int64_t id = std::clamp<int64_t>(row_ids[i], 0, num_rows - 1), limit = max_len - lengths[i];
    LookUp({history + id * max_len, lengths[i]}, rule, has_corpus ? &corpus : nullptr,
           has_corpus ? corpus.row_salts + 2 * id : nullptr, std::min(num_drafts, limit), drafts + i * num_drafts);
  }
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* JaxserveLookup(XLA_FFI_CallFrame* frame) { return Answer(frame, Call); }
