"""What people ask a chat assistant, as templates, and the words that fill them; written for this project.

Data only, for `prompts.py`. A template is a line: {slot} is a word of that list, another one each time, {slot1} the
same one wherever it stands, {2-20} a number in that range. The one idea is breadth: hundreds of ways to ask times
hundreds of things to ask about, kept away from every evaluation set. Read next: `prompts.py`.
"""

from __future__ import annotations


def _lines(text: str) -> tuple[str, ...]:
    """Return the lines of a block that are not empty, a written-out \\n in them made a line break."""
    return tuple(line.strip().replace("\\n", "\n") for line in text.splitlines() if line.strip())


def _lists(text: str) -> dict[str, tuple[str, ...]]:
    """Return the lists of a block by name: paragraphs of the form `name: entry | entry`."""
    named = (" ".join(paragraph.split()).split(": ", 1) for paragraph in text.split("\n\n"))
    return {name: tuple(entry.strip() for entry in entries.split(" | ")) for name, entries in named}


SYSTEMS = _lines("""
You are a helpful assistant.
You are a friendly and patient teacher who explains things simply.
You are an experienced {job}. Answer from that experience.
Answer briefly and to the point.
Answer in as much detail as is useful, with examples.
You are a concise technical writer.
You are an assistant inside a {industry} company's website.
Be polite, accurate and honest; say so when you do not know.
Always answer in plain English without jargon.
You are a coding assistant. Give working code first, then a short explanation.
You are a {trait} assistant who likes {hobby}.
Format every answer in Markdown.
You are an expert in {field}.
Respond as if you were talking to a {audience}.
You are a careful reasoner. Think step by step before giving the answer.
You are a creative writer with a {tone} style.
You help people plan their day, their meals and their trips.
Use short sentences. Avoid lists.
Use bullet points wherever they help.
You are an assistant for people who learn English.
""")
OPENERS = _lines("""
Hi!
Hello there.
Hey,
Hi, I hope you can help me.
Quick question:
I'm a {job} and I need some help.
I'm a {audience}, so keep that in mind.
My {relative} asked me this and I did not know what to say.
I'm preparing for a {event} next {weekday}.
I live in {city}.
Sorry if this is a silly question.
Good morning!
I've been thinking about this all {daytime}.
For a class on {field}:
For my work in {industry}:
Please help me with the following.
I need this by {weekday}.
One more thing.
Let's talk about something else.
I'm new to this.
OK, next task:
""")
LIMITS = _lines("""
Keep it short.
Answer in one sentence.
Answer in two or three sentences.
Answer in a single paragraph.
Use no more than {30-250} words.
Write about {2-6} paragraphs.
Use bullet points.
Give me a numbered list.
Give {2-9} examples.
Explain your reasoning.
Think step by step.
Make it {tone}.
Write for a {audience}.
Use simple words.
Put the result into a table.
End with a question.
Include a title.
Add a short summary at the end.
Be as specific as you can.
Avoid technical terms.
Use an analogy with {food}.
Give me only the answer.
Answer in Markdown with headings.
Please mention at least one example from {country}.
What should I read next?
Also tell me the most common misunderstanding.
Format the answer as JSON.
Be honest.
Please be detailed.
""")
HOW_SOLVED = _lines("""
How would I work this out?
Explain how to approach this.
Which method would you use, and why?
Walk me through it with an example.
What formula applies here?
Break this down into steps.
""")
WRITE_PROGRAM = _lines("""
Write a Python function for this.
Can you code this in Python?
Describe an algorithm for this task, then implement it.
Implement the following in JavaScript.
I need a small program that does this:
Write clean, commented code for the task below.
Give me pseudocode for this:
""")
CODE_ASKS = _lines(r"""
What does this function do?\n\n{code}
Explain this {language} code to me, step by step.\n\n{code}
Write a docstring for this:\n\n{code}
Find a bug in this code, if there is one.\n\n{code}
{code}\n\nHow could this be made easier to read?
{code}\n\nWhat happens here if the input is empty?
Review this code as a senior engineer would:\n\n{code}
Write unit tests for the following code.\n\n{code}
{code}\n\nSummarise what this does in two sentences.
Rewrite this with clearer names and comments:\n\n{code}
Add type hints to this {language} code.\n\n{code}
Translate this to JavaScript:\n\n{code}
{code}\n\nWhat is the time complexity, and can it be improved?
What could go wrong when this code runs?\n\n{code}
Which exceptions can this raise?\n\n{code}
{code}\n\nContinue this file with the next function that would make sense.
I found this in a library. Why is it written this way?\n\n{code}
Port this to C++:\n\n{code}
{code}\n\nExplain the return value and every argument.
Simplify this code without changing what it does.\n\n{code}
Repeat this code, but with logging added.\n\n{code}
""")
PASSAGE_ASKS = _lines(r"""
Continue this text:\n\n{passage}
Summarise this:\n\n{passage}
{passage}\n\nSummarise the text above in three bullet points.
{passage}\n\nWhat are the most important points?
Explain the following to a beginner.\n\n{passage}
Rewrite this so that it is easier to understand:\n\n{passage}
Write three questions that this text answers, with their answers.\n\n{passage}
Which terms in this text need explaining? Explain them.\n\n{passage}
{passage}\n\nWrite a short tutorial based on this.
{passage}\n\nGive an example of how this is used.
Find a good title for this text and say why it fits:\n\n{passage}
Turn the following documentation into a friendly e-mail to a colleague.\n\n{passage}
List all names, options and numbers that appear here:\n\n{passage}
{passage}\n\nWhat is this about, and who would need it?
Correct and shorten this text:\n\n{passage}
{passage}\n\nGo on from here.
""")

WORDS = _lists("""\
topic: climate change | renewable energy | artificial intelligence | remote work | social media | space travel |
healthy eating | time management | public transport | online privacy | electric cars | video games | meditation | the
stock market | urban gardening | mental health | recycling | learning languages | parenting | minimalism | vaccination
| home schooling | tourism | coffee culture | fast fashion | nuclear power | cryptocurrency | immigration | universal
basic income | vegetarianism | sleep | friendship | procrastination | public speaking | volunteering | chess |
photography | jazz | street food | board games | architecture | robots | deep sea life | genetic engineering |
cybersecurity | team work | leadership | personal finance | insurance | renting a flat | buying a house | marathon
training | yoga | houseplants | beekeeping | wine | tea | bread baking | dog training | wildlife protection | drones |
3D printing | virtual reality | open source software | big data | smart homes | e-books | public libraries | museums |
theatre | opera | hip hop | stand-up comedy | podcasts | film making | anime | comic books | fantasy novels |
detective stories | poetry | mythology | dinosaurs | volcanoes | earthquakes | hurricanes | the weather | water
shortages | plastic waste | deforestation | organic farming | fishing | hunting | camping | hiking | cycling |
swimming | football | tennis | basketball | the Olympic Games | chess engines | ageing | childhood | school uniforms |
exams | homework | university fees | job interviews | unemployment | pensions | taxes | inflation | globalisation |
trade unions | democracy | free speech | censorship | advertising | consumerism | luck | honesty | courage | happiness
| loneliness | boredom | grief | forgiveness | dreams | memory | creativity | intelligence | habits | addiction |
stress | burnout | allergies | back pain | first aid | sugar | alcohol | smoking | bicycles | trains | aviation |
bridges | skyscrapers | lighthouses | maps | calendars | time zones | handwriting | typography | emojis | dictionaries
| accents | sign language | translation | gossip | etiquette | weddings | gifts | holidays | birthdays | pets | night
shifts | commuting | traffic jams | small talk | power cuts | second-hand shops | self-driving cars | noise | light
pollution | city planning | rural life | dating apps | streaming services

concept: photosynthesis | gravity | entropy | natural selection | supply and demand | inflation | relativity | quantum
entanglement | osmosis | plate tectonics | the water cycle | the carbon cycle | cell division | DNA | black holes |
magnetism | electricity | sound waves | the Doppler effect | nuclear fusion | radioactivity | pH | catalysts |
covalent bonds | the periodic table | evolution | the immune system | antibiotics | vaccines | photons |
semiconductors | lasers | batteries | recursion | blockchain | encryption | machine learning | gradient descent |
neural networks | the Internet | DNS | HTTP | compilers | operating systems | virtual memory | databases | hash tables
| binary search | probability | standard deviation | Bayes' theorem | the normal distribution | correlation |
derivatives | integrals | logarithms | prime numbers | complex numbers | matrices | vectors | proof by induction |
game theory | the prisoner's dilemma | opportunity cost | compound interest | monopolies | GDP | exchange rates |
interest rates | the business cycle | comparative advantage | democracy | federalism | the separation of powers |
human rights | utilitarianism | existentialism | stoicism | free will | cognitive dissonance | confirmation bias | the
placebo effect | conditioning | working memory | attention | irony | metaphor | perspective in painting | harmony |
rhythm | the greenhouse effect | ocean currents | eclipses | the seasons | tides | rainbows | lightning | glaciers |
fossils | food chains | symbiosis | hormones | digestion | blood pressure | the nervous system | viruses | bacteria |
enzymes | proteins | mitochondria | stem cells | CRISPR | dark matter | the Big Bang | red shift | escape velocity |
friction | momentum | torque | buoyancy | surface tension | viscosity | heat conduction | superconductivity |
thermodynamics | sampling bias | hypothesis testing | overfitting | Newton's laws | Ohm's law | Moore's law | Occam's
razor | the Turing test | public-key cryptography | caching | garbage collection | deadlocks | load balancing |
containers | version control | agile development | technical debt | double-entry bookkeeping | depreciation |
insurance | mortgages | index funds | patents | copyright

field: physics | biology | chemistry | mathematics | statistics | computer science | history | geography | economics |
philosophy | psychology | sociology | linguistics | astronomy | geology | medicine | nursing | law | politics | art
history | music theory | literature | architecture | mechanical engineering | electronics | education | marketing |
accounting | ecology | anthropology | archaeology | nutrition | robotics | data science | theology | logistics

job: nurse | teacher | software developer | plumber | chef | lawyer | journalist | farmer | pilot | electrician |
accountant | architect | bus driver | carpenter | cashier | dentist | designer | detective | doctor | economist |
editor | engineer | fire fighter | florist | gardener | hairdresser | historian | judge | librarian | mechanic |
musician | novelist | nutritionist | optician | painter | pharmacist | photographer | physicist | police officer |
project manager | psychologist | real estate agent | receptionist | sailor | salesperson | scientist | secretary |
security guard | shop owner | social worker | surgeon | tailor | tour guide | translator | veterinarian | waiter | web
designer | zookeeper | astronaut | barista | data analyst | flight attendant | personal trainer | startup founder |
system administrator | travel agent | truck driver | watchmaker | bee keeper | stage magician | coach

country: Japan | Brazil | Kenya | Norway | Italy | Canada | India | Egypt | Mexico | Australia | Germany | France |
Spain | Portugal | Greece | Turkey | Morocco | Nigeria | South Africa | Ethiopia | Vietnam | Thailand | Indonesia |
China | South Korea | Mongolia | Nepal | Iran | Israel | Poland | Ukraine | Finland | Sweden | Denmark | Iceland |
Ireland | Scotland | the Netherlands | Belgium | Switzerland | Austria | Hungary | Romania | Croatia | Peru | Chile |
Argentina | Colombia | Cuba | Jamaica | New Zealand | the Philippines | Singapore | Tanzania | Ghana | Bolivia |
Estonia

city: Lisbon | Kyoto | Nairobi | Oslo | Rome | Toronto | Mumbai | Cairo | Mexico City | Sydney | Berlin | Paris |
Barcelona | Porto | Athens | Istanbul | Marrakesh | Lagos | Cape Town | Hanoi | Bangkok | Jakarta | Shanghai | Seoul |
Kathmandu | Warsaw | Helsinki | Stockholm | Copenhagen | Reykjavik | Dublin | Edinburgh | Amsterdam | Brussels |
Zurich | Vienna | Budapest | Prague | Lima | Santiago | Buenos Aires | Bogota | Havana | Wellington | Manila | Chicago
| New Orleans | Boston | Seattle | Denver | Montreal | Vancouver | Florence | Naples | Seville | Leeds | Hamburg |
Lyon | Krakow

animal: cat | dog | horse | elephant | octopus | penguin | owl | wolf | dolphin | whale | shark | bee | ant | spider |
crow | parrot | hedgehog | fox | bear | tiger | lion | giraffe | zebra | kangaroo | koala | platypus | bat | mole |
beaver | otter | seal | polar bear | snow leopard | camel | donkey | goat | sheep | cow | pig | chicken | duck | swan
| eagle | hummingbird | crocodile | turtle | chameleon | snake | frog | salamander | salmon | seahorse | jellyfish |
crab | snail | butterfly | dragonfly | firefly | sloth | anteater | rabbit | hamster | squirrel | raccoon | badger |
moose | reindeer | gorilla

food: pizza | sushi | pancakes | lentil soup | lasagna | curry | tacos | ramen | paella | risotto | goulash | falafel
| hummus | apple pie | chocolate cake | banana bread | sourdough bread | omelette | potato salad | fried rice |
dumplings | pad thai | kimchi | gnocchi | ratatouille | shepherd's pie | chili | burritos | guacamole | pesto |
waffles | porridge | yoghurt | cheesecake | tiramisu | ice cream | lemonade | iced tea | vegetable stew | tomato soup
| roast chicken | grilled fish | meatballs | couscous | tofu | mushrooms | pumpkin | rice pudding | granola | muffins

tech: smartphones | laptops | electric bikes | heat pumps | solar panels | wind turbines | smart watches | e-readers |
tablets | routers | hard drives | graphics cards | microphones | cameras | drones | televisions | washing machines |
induction cookers | vacuum robots | headphones | game consoles | printers | 3D printers | GPS devices | satellites |
electric cars | hydrogen cars | trams | elevators | batteries | LED lamps | barcode scanners | speech recognition |
search engines | spreadsheets | e-mail | instant messaging | cloud storage | password managers | ad blockers

language: Python | JavaScript | TypeScript | Java | C | C++ | C# | Go | Rust | Ruby | PHP | Swift | Kotlin | Scala | R
| Perl | Haskell | Lua | Julia | Bash | PowerShell | Elixir | Dart | SQL | MATLAB

tongue: French | Spanish | German | Italian | Portuguese | Dutch | Swedish | Polish | Turkish | Japanese | Chinese |
Korean | Arabic | Hindi | Latin | Greek | Russian | Swahili | Indonesian | Esperanto

figure: Marie Curie | Albert Einstein | Isaac Newton | Charles Darwin | Leonardo da Vinci | Cleopatra | Julius Caesar
| Napoleon | Joan of Arc | Galileo Galilei | Ada Lovelace | Alan Turing | Nikola Tesla | Florence Nightingale | Mozart
| Beethoven | Bach | Frida Kahlo | Vincent van Gogh | Pablo Picasso | William Shakespeare | Jane Austen | Mark Twain |
Homer | Socrates | Plato | Aristotle | Confucius | Buddha | Genghis Khan | Marco Polo | Christopher Columbus |
Ferdinand Magellan | Queen Victoria | Elizabeth I | Catherine the Great | Abraham Lincoln | Mahatma Gandhi | Nelson
Mandela | Martin Luther King | Rosa Parks | Amelia Earhart | Neil Armstrong | Rosalind Franklin | Louis Pasteur |
Gregor Mendel | Archimedes | Euclid | Johannes Gutenberg | Karl Marx | Adam Smith | Sigmund Freud | Simone de Beauvoir
| Immanuel Kant | Grace Hopper | Katherine Johnson | Emmy Noether | Ibn Battuta | Hypatia | Saladin

history: the French Revolution | the Industrial Revolution | the fall of the Roman Empire | the Black Death | the Cold
War | the First World War | the Renaissance | the Reformation | the Silk Road | the Viking Age | the Ottoman Empire |
the Mongol conquests | the abolition of slavery | the invention of printing | the Moon landing | the fall of the
Berlin Wall | the Great Depression | the Meiji Restoration | the Inca Empire | ancient Egypt | ancient Athens | the
Punic Wars | the Crusades | the Magna Carta | the Hundred Years' War | the age of exploration | the Spanish Armada |
the American Civil War | the Russian Revolution | women's suffrage | decolonisation in Africa | the Irish famine | the
gold rush | the building of the Suez Canal | the Congress of Vienna | the Enlightenment | the Bronze Age

hobby: knitting | bird watching | painting | chess | gardening | running | baking | playing the guitar | playing the
piano | singing | dancing | sailing | rock climbing | skiing | surfing | photography | pottery | woodworking | stamp
collecting | astronomy | model trains | crossword puzzles | calligraphy | origami | archery | fishing | yoga |
blogging | coding | electronics | home brewing | cooking | juggling | magic tricks | table tennis | horse riding

object: umbrella | bicycle | wallet | lamp | suitcase | violin | teapot | mirror | key | clock | painting | camera |
ring | backpack | telescope | typewriter | kite | lantern | chair | piano | rug | vase | notebook | coat | pair of
boots | sofa | kettle | ladder | tent | radio | map | compass | candle | music box | chess set | fountain pen | mug |
phone | drum

place: library | train station | small village | lighthouse | desert | forest | hospital | school | harbour | airport
| market | castle | museum | farm | island | mountain hut | space station | submarine | theatre | bakery | hotel |
prison | office | park | swimming pool | cemetery | old factory | subway | cafe | zoo | greenhouse | abandoned house |
monastery

industry: banking | insurance | retail | health care | construction | farming | tourism | fashion | film | energy |
logistics | software | education | real estate | car repair | catering | publishing | sports | telecom | fitness

audience: ten-year-old | complete beginner | college student | busy manager | retired person | new employee | expert |
teenager | foreign visitor | worried parent | high school class | group of investors | curious neighbour | customer

tone: funny | formal | friendly | sad | hopeful | dramatic | romantic | sarcastic | serious | scary | poetic |
enthusiastic | persuasive | calm | mysterious | playful | polite | confident | melancholic | warm | dry |
old-fashioned

trait: cheerful | grumpy | wise | nervous | curious | lazy | brave | clumsy | arrogant | gentle | forgetful | stubborn
| honest | greedy | shy | ambitious | lonely | absent-minded | optimistic | suspicious | patient | witty

relative: mother | father | sister | brother | grandmother | grandfather | daughter | son | aunt | uncle | cousin |
neighbour | boss | colleague | roommate | teacher | girlfriend | boyfriend | wife | husband | landlord | best friend

event: wedding | job interview | birthday party | conference | funeral | graduation | school play | road trip | exam |
charity run | family reunion | product launch | board meeting | book club meeting | moving day | concert | barbecue |
first date | town hall meeting | science fair | housewarming | retirement party | workshop | job fair

weekday: Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday

daytime: morning | afternoon | evening | night | week | day

month: January | February | March | April | May | June | July | August | September | October | November | December

name: Anna | Ben | Carla | David | Elena | Farid | Grace | Hiro | Ines | Jonas | Kofi | Lena | Mateo | Nadia | Omar |
Priya | Quentin | Rosa | Samir | Tara | Ulrich | Vera | Wei | Ximena | Yusuf | Zoe | Marta | Leo | Ivy | Oscar

surname: Miller | Rossi | Tanaka | Okafor | Schmidt | Garcia | Novak | Larsen | Kim | Patel | Dubois | Silva | Murphy
| Haddad | Kowalski | Johansson | Nguyen | Brown | Fischer | Moreau

problem: I cannot sleep | my neighbour is too loud | I am always late | I feel stuck in my job | my plants keep dying
| I argue with my partner about money | I forget names | my child refuses to eat vegetables | I am afraid of flying |
my colleague takes credit for my work | I spend too much time on my phone | I cannot save money | my dog barks all
night | I am nervous before presentations | I have no energy in the afternoon | I do not know what to study | my
friend stopped answering my messages | my flight was cancelled | my rent was raised | I lost my passport | I get
headaches from the screen | I always say yes to extra work | I moved to a new town and know nobody | my landlord will
not fix the heating | I failed an exam | I miss my old life | I was not promoted | my car makes a strange noise | my
basement is damp | I hate my haircut | I cannot decide between two job offers | my teenager will not talk to me | I am
bored at work | I keep losing my keys | my knees hurt after running

skill: tie a tie | change a flat tyre | boil an egg | write a CV | start a blog | learn to swim | save for retirement
| clean a cast iron pan | remove a red wine stain | grow tomatoes | build a bookshelf | train for a half marathon |
meditate | negotiate a salary | read faster | learn touch typing | sharpen a knife | brew good coffee | bake bread
without yeast | iron a shirt | fix a leaking tap | paint a room | pack a suitcase | plan a budget | file taxes |
choose a mattress | adopt a dog | set up a home network | back up my photos | create a strong password | speak in
front of people | make friends as an adult | stop biting my nails | memorise a poem | learn the guitar | draw faces |
take better photos | write a will | prepare for an exam | host a dinner party | remove a splinter | sew on a button |
clean windows without streaks | start composting | jump-start a car | read a map | apologise properly | give feedback
| run a meeting | delegate work | wake up early | cook rice | poach an egg | repot a plant | survive a night in the
cold | find north without a compass | calm a crying baby | teach a child to ride a bike

function: reverses a string | checks whether a word is a palindrome | finds the largest number in a list | counts the
words in a text file | sorts a list of dates | removes duplicates from a list | merges two sorted lists | converts
Celsius to Fahrenheit | computes a factorial | lists the prime numbers below a limit | parses a CSV file | validates
an e-mail address | downloads a web page | generates a random password | converts Roman numerals | finds the shortest
path in a graph | implements a stack | implements a queue with two stacks | implements an LRU cache | inverts a binary
tree | detects a cycle in a linked list | prints a calendar | solves a Sudoku | plays tic-tac-toe | simulates a dice
game | counts vowels | finds anagrams | compresses a string with run-length encoding | rotates a matrix | multiplies
two matrices | computes the median | groups records by a key | flattens a nested list | computes the edit distance
between two words | reads a JSON file and prints a field | renames all files in a folder | resizes images | sends an
e-mail | logs to a file | retries a failing request | limits the rate of calls | formats a number with thousands
separators | converts between time zones | computes the distance between two coordinates | draws a bar chart | scrapes
headlines | queries a database | counts lines of code | encrypts a message with a Caesar cipher | checks balanced
brackets | evaluates an arithmetic expression | finds the longest common prefix | computes Fibonacci numbers |
shuffles a deck of cards | converts a number to binary | finds missing numbers | computes a moving average |
implements a timer

app: to-do list | weather app | chat server | URL shortener | blog | calculator | online shop | quiz game | budget
tracker | recipe collection | photo gallery | flash card trainer | library catalogue | booking system | poll app |
snake game | markdown editor | file backup tool | news reader | habit tracker | inventory system | music player

table: orders | customers | employees | products | students | flights | invoices | books | patients | sensors |
tickets

pattern: e-mail addresses | phone numbers | dates in ISO format | postcodes | hex colours | URLs | IP addresses |
prices in euros | times of day | hashtags | HTML tags | words in capitals | file names ending in .txt | quoted strings

bug: IndexError: list index out of range | TypeError: 'NoneType' object is not subscriptable | KeyError: 'name' |
ModuleNotFoundError: No module named 'requests' | segmentation fault | undefined is not a function | cannot read
properties of undefined | NullPointerException | stack overflow | connection refused | permission denied | CORS policy
error | merge conflict | out of memory | UnicodeDecodeError | 404 not found | 502 bad gateway | deadlock detected |
syntax error near unexpected token | RecursionError: maximum recursion depth exceeded

tool: Git | Docker | Kubernetes | PostgreSQL | SQLite | Redis | NumPy | pandas | PyTorch | React | Vue | Django |
Flask | Node.js | nginx | Linux | tmux | Vim | VS Code | Excel | LaTeX | Markdown | ffmpeg | curl | SSH | cron | Make
| CMake | pytest | Terraform | GraphQL | RabbitMQ | Kafka | Elasticsearch | Jupyter | Blender | GIMP | Arduino |
Raspberry Pi | WordPress

genre: fairy tale | science fiction story | ghost story | detective story | love story | fable | western | comedy
sketch | adventure story | horror story | bedtime story | diary entry | monologue | children's story | legend |
thriller

poem: poem | haiku | limerick | sonnet | song | rap | ballad | free verse poem | nursery rhyme | ode | acrostic |
elegy

plot: loses an {object} | finds a hidden door in a {place} | befriends a {animal} | wakes up in {city} a hundred years
from now | can hear the thoughts of a {animal} | inherits a {place} | wins the lottery and tells nobody | must cook
{food} for a queen | opens a shop for used {object}s | gets a letter from {figure} | is the last person in a {place} |
swaps lives with a {job} | discovers that {topic} is a secret code | misses the last train home | builds a machine
that forgets | learns to fly | has one day to save a {place} | gets lost in {country}

being: {trait} {job} | {trait} {animal} | {trait} robot | {trait} pirate | {trait} ghost | {trait} king | old {job} |
young {job} | {trait} wizard | medieval knight | time traveller | talking {object} | dragon | alien visitor | vampire
who is afraid of the dark | {job} on the Moon | Roman soldier | Viking | detective | famous {job} | {trait} chef

sentence: The {animal} slept under the old {object} all {daytime}. | I would like a table for {2-9} people on
{weekday}. | Where can I buy a good {object} near the {place}? | My {relative} works as a {job} in {city}. | It has
been raining in {city} since {weekday}. | Could you please tell me when the next train to {city} leaves? | We are
planning a {event} in {month}. | She has never eaten {food} before. | If I had more time I would take up {hobby}. |
The meeting about {topic} was moved to {weekday}. | Nobody knew who had left the {object} in the {place}. | He
promised to call his {relative} before {weekday}. | Thank you for your help with the {event}. | There are {3-40}
chairs in the {place}. | I forgot my {object} at the {place} yesterday.

badsentence: me and him was going to the {place} yesterday | Their going to loose they're {object} if there not
carefull. | She dont like {food} because it make her sick. | I has been living in {city} since three years. | The
datas shows that less people is interested in {topic}. | He said me that he want buy a {object}. | Between you and I
the {event} were a disaster. | its been along time since i seen a {animal} in the {place} | Each of the {job}s have
their own {object}. | If I would have known I would of came to the {event}. | who's {object} is this

fact: {name} {surname} is a {job} from {city}, aged {19-78}. | The {event} takes place on {weekday} the {4-20}th of
{month} in {city}. | The ticket costs {5-180} dollars. | {name} ordered {2-9} portions of {food} for the {event}. |
The {place} was built in {1650-2015} and is visited by {2-90} thousand people a year. | {name} {surname} bought a
{object} for {4-400} euros. | The company employs {12-900} people in {country} and {country}. | In {1950-2023} the
firm was sold to {name} {surname}. | Sales of {tech} rose by {2-60} percent in {month}. | The number to call is
555-{1000-9999}. | The train to {city} leaves at {6-22}:{10-59} from platform {1-14}. | {name} has a meeting with
{name} {surname} about {topic} on {weekday}. | A {animal} escaped from the {place} in {city} and was found near a
{place} {2-30} hours later. | It rained for {2-20} days. | The mayor said that {topic} would be discussed again in
{month}. | Two thirds of those asked were against {topic}. | The {job} arrived late because the road from {city} was
closed.

opinion: The {food} was cold and the waiter ignored us. | I have never slept better than in this hotel in {city}! |
The {object} broke after {2-20} days but the shop gave me my money back. | Great sound; poor battery. | It is fine;
nothing special. | My {relative} loves it and I do too. | Delivery took {2-9} weeks and nobody answered my calls. |
The film starts slowly but the ending made me cry. | Worst {event} I have ever been to. | The staff were kind although
the {place} was crowded. | I expected more for {20-300} dollars. | I would buy this {object} again.

pair: cats and dogs | tea and coffee | {country} and {country} | {city} and {city} | {language} and {language} |
{tool} and {tool} | renting and buying | trains and planes | books and films | {hobby} and {hobby} | {food} and {food}
| {figure} and {figure} | {concept} and {concept} | {tech} and {tech} | a {animal} and a {animal} | working from home
and working in an office | mitosis and meiosis | weather and climate | arteries and veins | frogs and toads | HTTP and
HTTPS | TCP and UDP | arrays and linked lists | processes and threads | debit cards and credit cards | stocks and
bonds | viruses and bacteria | stars and planets | simile and metaphor | jam and marmalade | alligators and crocodiles
| baroque and classical music | {history} and {history} | {field} and {field} | speed and velocity

number: {2-99} | {10-999} | {100-9999}
""")

TEMPLATES = _lines("""
What is {concept}?
Explain {concept} to a {audience}.
Explain {concept} in simple terms.
Why is {concept} important in {field}?
Who discovered or first described {concept}?
Give an everyday example of {concept}.
What are common misconceptions about {concept}?
How does {concept} work?
Can you describe {concept} using an analogy with {food}?
What questions about {concept} might come up in an exam?
Describe the history of {concept}.
How is {concept} related to {concept}?
I don't understand {concept}. Can you start from the very beginning?
Write a short quiz with {3-8} questions about {concept}, with answers.
Make flash cards for the main ideas of {concept}.
What would the world look like without {concept}?
What is the difference between {pair}?
Compare {pair}.
Which is better, and for whom: {pair}?
Make a table comparing {pair}.
What do {pair} have in common?
I have to choose between {pair}. Help me decide.
Write a dialogue in which two friends argue about {pair}.
What are the pros and cons of {topic}?
What do you think about {topic}?
Why do people care about {topic}?
How has {topic} changed in the last {10-60} years?
What will {topic} look like in {2030-2100}?
Give me {3-10} interesting facts about {topic}.
Write an introduction to an essay on {topic}.
Write an outline for a talk about {topic} at a {event}.
Argue in favour of {topic}, then against it.
What does {topic} have to do with {topic}?
Suggest {3-12} questions I could ask an expert on {topic}.
Write a {tone} blog post about {topic}.
Write a {tone} speech about {topic} for a {event}.
Write a newspaper headline and a first paragraph about {topic} in {city}.
Write a social media post about {topic} with a few hashtags.
How can I teach a {audience} about {topic}?
Recommend books for someone interested in {topic}.
What are the biggest myths about {topic}?
Is {topic} good for society?
How do people in {country} think about {topic}?
What statistics would you look at to understand {topic}?
Design a survey of {5-12} questions about {topic}.
Write a letter to the editor about {topic} in {city}.
Give me a debate plan: {topic} should be taught at school.
Brainstorm {5-20} ideas for a project about {topic}.
Come up with names for a podcast about {topic}.
Write a slogan for a campaign about {topic}.
Summarise what is known about {topic} in one paragraph.
Explain the economics of {topic}.
What are the ethical questions around {topic}?
Write a {poem} about {topic}.
Write a {poem} about a {animal} and a {object}.
Write a {tone} {poem} for my {relative}.
Write a {tone} {genre} about a {being} who {plot}.
Write a {genre} set in a {place} in {city}.
Write the first paragraph of a novel in which a {being} {plot}.
Write the ending of a story in which a {being} {plot}.
Describe a {place} at {daytime} so that the reader can smell it.
Describe a {being} without saying what it is.
Continue the story: "{sentence} Then somebody knocked."
Continue: Once upon a time, a {being} lived in a {place} near {city}.
Write a dialogue between a {being} and a {being} about {topic}.
Write a short scene for the stage with a {being} and a {job}.
Give me {3-10} titles for a {genre} about a {animal}.
Create a character sheet for a {being} in a role-playing game.
Invent a holiday that celebrates {food}.
Invent a new sport played with a {object}.
Tell me a joke about a {job} and a {animal}.
Tell me a riddle whose answer is a {object}.
Make up a tongue twister about a {animal}.
Write a review of an imaginary film called "The {object} of {city}".
Write song lyrics about {hobby} in {month}.
You are a {being}. Introduce yourself.
You are a {being}. I ask you: what do you think of {topic}?
Pretend to be {figure} and answer: what would you think of {tech}?
Speak like a {being} and explain {concept}.
Act as a {job}. I tell you: {problem}.
Let's role-play: you are a {job} and I am a customer with a broken {object}. You start.
Act as an interviewer for a job as {job}. Ask me your first three questions.
Imagine you are a {object} in a {place}. What do you see in a day?
Be my {tongue} teacher. Start with a short first lesson.
Play the devil's advocate: I think that {topic} is a waste of time.
Answer as a {trait} {relative} would: may I borrow your {object}?
Be a tour guide in {city} and welcome a group of {job}s.
Write an e-mail to my {relative} about the {event} on {weekday}.
Write an e-mail to a customer whose {object} arrived broken.
Write a formal e-mail asking for a day off on {weekday} because of a {event}.
Write an e-mail declining an invitation to a {event}.
Write a complaint to a {place} about {3-48} hours of waiting.
Write a thank-you note to a {job}.
Write an apology to my {relative}; I forgot the {event}.
Write a cover letter for a job as a {job} in {industry}.
Write a job advertisement for a {job} in {city}.
Write a product description for a {tone} {object}.
Write a {tone} advertisement for {food}.
Write a message to my {relative}: {problem}.
Write a reference letter for {name}, a former {job}.
Write a short biography of {name} {surname}, a {job} from {city}.
Write an invitation to a {event} in a {place} on {weekday}.
Write a toast for a {event}.
Write minutes for a meeting in which {name}, {name} and {name} talked about {topic}.
Write a press release: a {industry} company from {city} presents new {tech}.
Write a {tone} restaurant review; I had {food} and {food}.
Write a review of a hotel in {city}.
Write a memo about {topic} for the staff of a {industry} company.
Draft a project plan for a {app}.
Draft a newsletter for a {place}.
Rewrite this in a {tone} way: {sentence}
Rewrite this more politely: Give me back my {object} by {weekday} or else.
Rewrite in the past tense: {sentence} {sentence}
Turn this into a question: {sentence}
Shorten this: {fact} {fact} {fact}
Expand this into a paragraph: {sentence}
Correct the grammar: {badsentence}
Correct all mistakes and explain them: {badsentence} {badsentence}
Proofread this note: Dear {name}, {badsentence} See you at the {event}. {name}
Make this sound more natural: {badsentence}
Say this in three different ways: {sentence}
Translate into {tongue}: {sentence}
Translate to {tongue} and explain each word: {sentence}
How do you say "{sentence}" in {tongue}?
What does "{object}" mean in {tongue}, and how is it pronounced?
Teach me {5-12} useful phrases in {tongue} for a {place}.
What are the hardest things about learning {tongue}?
Use the words {object}, {animal} and {place} in one sentence.
Give synonyms for "{trait}" and use each in a sentence.
What is the opposite of "{tone}"? Give several.
Explain the idiom "a storm in a teacup" and give two similar ones about {food}.
Summarise: {fact} {fact} {fact} {fact} {fact}
Summarise in one sentence: {fact} {fact} {fact} {fact}
Extract all names and places: {fact} {fact} {fact} {fact}
Extract all numbers and say what they stand for: {fact} {fact} {fact} {fact}
Turn into JSON with sensible keys: {fact} {fact} {fact}
Make a table from this: {fact} {fact} {fact} {fact}
Who is mentioned here, and what did they do? {fact} {fact} {fact} {fact}
Answer from the text only: {fact} {fact} {fact} When does something happen, and where?
Read this and write three questions about it: {fact} {fact} {fact} {fact}
List every date, time and price as CSV: {fact} {fact} {fact} {fact}
Write a news report from these notes: {fact} {fact} {fact}
Is this review positive, negative or mixed? "{opinion}"
Classify each as positive, neutral or negative: 1. {opinion} 2. {opinion} 3. {opinion}
What should the owner change first, going by these comments? {opinion} {opinion}
Answer this customer as the owner would: {opinion}
Sort into groups: {animal}, {object}, {food}, {animal}, {city}, {object}, {country}, {food}.
What links a {animal}, a {object} and {city}? Find something.
Put these in alphabetical order: {city}, {country}, {city}, {name}, {country}, {city}.
Is this sentence a question, an order or a statement? {sentence}
Find the verbs and nouns in: {sentence}
Which subject is this about, {field}, {field} or {field}? "{concept}"
Sort by size: a {animal}, a {animal}, a {animal} and a {animal}.
Plan a {2-9}-day trip to {city} in {month}.
Plan a weekend in {city} for a {job} who loves {hobby}.
Plan a road trip through {country} with a budget of {300-4000} dollars.
What should I pack for {2-20} days in {country} in {month}?
What should I see in {city}?
What should I know before moving to {country}?
What food is {country} known for?
What is the best time of the year to visit {country}?
Plan a menu for a {event} with {4-40} guests, some of them vegetarian.
Make a shopping list for {food} and {food} for {2-12} people.
Make a meal plan for a week, without {food}.
Make a study plan for {field}: {2-12} weeks, {1-4} hours a day.
Make a cleaning schedule for a flat shared by {name}, {name} and {name}.
Make a training plan for someone who wants to start {hobby}.
Plan my {weekday}: gym, {event}, shopping, calling my {relative}, and two hours of {hobby}.
Organise a {event} in {2-8} weeks: what has to be done when?
Make a monthly budget for someone who earns {1200-6000} euros in {city}.
Give me a recipe for {food}.
How do I make {food} without an oven?
What can I cook with {food}, eggs and {2-5} onions?
What goes well with {food}?
Is {food} healthy?
Where does {food} come from?
How do I {skill}?
Step by step, how does one {skill}?
What do I need to {skill}?
What mistakes do people make when they try to {skill}?
How long does it take to {skill}?
Write a short guide for a {audience}: how to {skill}.
My {relative} wants to {skill}. Any tips?
{problem}. What can I do?
{problem}. Give me {3-8} practical tips.
What would you say to a friend who says: "{problem}"?
{problem}, and {problem}. Where do I start?
How do I tell my {relative} that {problem}?
How do I get started with {hobby}?
What equipment do I need for {hobby}, and what does it cost?
Why do so many people enjoy {hobby}?
What does a {job} do all day?
How do I become a {job}?
What are the hardest parts of being a {job}?
How will {tech} change the work of a {job}?
What should I ask in an interview for a job as a {job}?
Write an honest day in the life of a {job} in {city}.
Suggest gifts for a {trait} {relative} who likes {hobby}.
Suggest names for a {animal}.
Suggest names for a {place} that sells {food}.
Suggest {5-15} ways to use an old {object}.
Brainstorm business ideas that combine {topic} and {tech}.
Brainstorm {4-12} ways to make a {place} more welcoming.
Write a business plan in short form for a shop for {food} in {city}.
How would you market {tech} to a {audience}?
How do {tech} work?
What should I look for when buying {tech}?
How will {tech} develop in the next {5-30} years?
Are {tech} good for the environment?
Who was {figure}?
What is {figure} famous for?
Write a short biography of {figure}.
What would {figure} say about {topic}?
Did {figure} ever meet {figure}? If not, imagine it.
Write a diary entry by {figure}.
What can we learn from the life of {figure}?
What caused {history}?
What were the effects of {history}?
Tell me about {history} as if you had been there.
Make a timeline of {history}.
How did {history} change daily life?
Why is {history} still relevant today?
How did {history} affect {country}?
What were people eating during {history}?
Give two historians' opposing views of {history}.
What is the capital of {country}, and what is it known for?
Describe the geography and climate of {country}.
Name {3-9} rivers, mountains or lakes in {country}.
Which countries border {country}?
How did the economy of {country} develop after {1900-2000}?
What languages are spoken in {country}?
What are typical customs in {country}?
How would inflation affect a {job} in {country}?
What happens to prices when the supply of {food} drops by {10-60} percent?
Explain {concept} as it would affect a small {place}.
Tell me about the {animal}.
What does a {animal} eat?
How do {animal}s sleep?
Why does a {animal} look the way it does?
Could a {animal} live in {country}?
Who would win in a game of chess: a {animal} or a {animal}? Be creative.
How long does a {animal} live, and why?
How do scientists study a {animal} in the wild?
Explain the life cycle of a {animal}.
What would happen if every {animal} disappeared?
Why is the sky blue at noon and red in the evening?
Why does {food} taste different when it is cold?
Why does ice float?
What happens in the body when {problem}?
What happens to a {object} that falls from {5-90} metres? Ignore the air.
A ball is thrown upwards at {5-30} metres per second. How high does it get?
How much energy does it take to heat {1-9} litres of water by {10-80} degrees?
A car brakes from {30-130} km/h in {2-9} seconds. What is the deceleration?
Which gas, liquid or solid would you expect to be denser, and why: {food} or water?
Balance the equation for burning methane and explain each step.
Design a simple experiment for a {audience} that shows {concept}.
What is the role of {concept} in {field}?
Which open questions remain in {field}?
Suggest a research project in {field} for a student who likes {hobby}.
What is {2-99} times {2-99}?
What is {number} plus {number} minus {2-99}?
What is {2-95} percent of {number}?
Divide {number} by {2-19} and give the remainder.
Is {number} a prime number?
Convert {2-300} miles to kilometres.
Convert {10-99} degrees Celsius to Fahrenheit.
Round {number}.{101-999} to one decimal.
What is the average of {2-99}, {2-99}, {2-99} and {2-99}?
Solve for x: {2-12}x + {2-60} = {61-200}.
Solve: x^2 - {2-12}x + {1-20} = 0.
Simplify: {2-9}(x + {2-9}) - {2-9}x.
What is the derivative of {2-9}x^{2-7} + {2-9}x?
What is the area of a rectangle of {2-40} by {2-40} metres?
A circle has a radius of {2-30} cm. What are its area and circumference?
What is the next number: {2-5}, {6-11}, {12-20}, {21-34}? Find a rule and defend it.
{name} has {30-90} euros and buys {2-5} mugs at {2-5} euros each. How much is left?
A recipe for {2-6} people needs {100-900} g of flour. How much for {7-24} people?
A train to {city} travels {80-600} km in {1-6} hours. How fast is it on average?
{name} is {2-9} years older than {name}; together they are {30-90}. How old are they?
{name} walks to the {place} in {10-50} minutes at {3-6} km/h. How far is it?
A {object} costs {20-200} dollars, minus {5-60} percent. What is the new price?
If {2-9} {job}s need {2-20} days for a job, how long do {10-18} of them need?
I save {10-300} euros a month at {1-6} percent interest. What do I have after {2-20} years?
There are {3-30} red and {3-30} blue balls in a bag. What is the chance of drawing two red ones?
How many ways are there to seat {3-8} guests in a row?
{name1}, {name2} and {name3} sit in a row. {name1} is not next to {name3}. Who can sit in the middle?
If all {animal1}s are {trait} and {name} is a {animal1}, what follows?
All {job1}s in {city} own a {object1}. {name1} owns a {object1}. Is {name1} a {job1}?
{name1} is taller than {name2} and {name3} is shorter than {name2}. Can we say who is the tallest?
Today is {weekday}. What day is it in {5-100} days?
It is {1-12}:{10-59} in {city}. What time is it in {city}?
How would you estimate the number of {animal}s in {country}?
How many cups of coffee are drunk in {city} every {daytime}? Make a rough estimate.
Explain the flaw in this argument: my {relative} eats {food1} every day and is healthy, so {food1} is healthy.
Write a {language} function that {function}.
Write a {language} program that {function}. Explain it line by line.
How do I write code in {language} that {function}?
Show me two ways to write a {language} function that {function}, and compare them.
Write tests for a {language} function that {function}.
Write pseudocode for a function that {function}.
What is the fastest way to write code that {function}?
Write a class in {language} for a {app}.
Write a command line tool in {language} that {function} and {function}.
Design the database tables for a {app}.
Design a REST API for a {app}.
Write a README for a {app} written in {language}.
Write the HTML and CSS for the start page of a {app}.
Which technologies would you pick to build a {app}, and why?
What does this error mean: {bug}?
I get "{bug}" when my {language} code {function}. How do I fix it?
My {app} crashes with "{bug}" after {2-60} minutes. How do I debug it?
Debug this: for i in range({3-20}): print(items[i+1])
Why does 0.1 + 0.2 not equal 0.3 in {language}?
Write an SQL query that returns the {2-10} newest rows of the table {table} for each customer.
Write an SQL query joining {table} and {table}, with the totals per month.
How do I find duplicates in the table {table} with SQL?
Write a regular expression that matches {pattern}.
Write a regular expression for {pattern} and explain every part.
Write a shell command that finds all files larger than {2-900} MB.
Write a shell script that {function}.
How do I use {tool}?
What is {tool} good for?
Explain the basics of {tool} to a {audience}.
How do I install {tool} on my computer?
Give me a cheat sheet for {tool}.
When should I not use {tool}?
How do {tool} and {tool} work together?
What are the most common mistakes with {tool}?
Why would someone choose {language} over {language}?
How do loops work in {language}?
How is memory managed in {language}?
Explain error handling in {language} with an example.
How do I read a file line by line in {language}?
Teach me {language} in five short lessons. Start with the first.
Review this commit message and improve it: "fixed stuff in {app}, {bug} gone".
Explain what an API is, with a {place} as an example.
What is the meaning of life?
Do you have feelings?
What can you do for me?
Tell me something I don't know about {topic}.
I'm bored. Entertain me for {2-30} minutes.
Cheer me up; {problem}.
Give me a quote about {topic} and explain it.
What is your favourite {food} recipe?
Would you rather be a {animal} or a {animal}?
Ask me {3-10} questions to find out what {hobby} level I have.
Guess what I have in my {place}: it is a kind of {object}.
Let's play twenty questions. I am thinking of a {animal}; you begin.
Quiz me on {field}. One question at a time.
Quiz me on {country}.
Recommend a film about {topic} and tell me why.
Recommend {2-6} novels set in {country}.
What music fits a {event} in a {place}?
How do I stay motivated to learn {field}?
How do I explain to my {relative} what a {job} does?
How do I say no to a {relative} who wants to borrow my {object}?
Should I buy a {object} now or wait until {month}?
Should I quit my job as a {job} and become a {job}?
Is it rude to talk about {topic} at a {event}?
What should I wear to a {event} in {month}?
How much should a {job} in {city} earn?
Write a bedtime story for {name}, who loves {animal}s and {hobby}.
Write a crossword clue for each of these: {animal}, {city}, {object}, {food}.
Write a horoscope for a {job} for {month}.
Write an obituary for a {object}.
Write a letter from a {animal} to a {job}.
Write instructions for aliens: how to eat {food}.
Write a warning label for {topic}.
Write a short lesson plan on {concept} for a {audience}.
Write an abstract for a paper on {concept} and {topic}.
Write a sceptical review of a book on {topic} by {name} {surname}.
Write a conversation in a {place} between {name}, a {job}, and {name}, a {job}.
Write five sentences that each contain the word "{object}".
Write a one-paragraph story without the letter z about a {animal}.
Give me a metaphor for {topic} and one for {concept}.
Give me a checklist for a {event}.
Give me a glossary of {5-15} terms used in {field}.
Give me advice on {topic} as a {job} would.
List the steps a {job} takes when a {object} breaks.
List {5-15} words that rhyme with "{animal}".
List the advantages of living in {city} for a {job}.
Rank these by usefulness on an island: {object}, {object}, {object}, {object}. Explain.
Create a weekly schedule for learning {tongue} with {10-60} minutes a day.
Create a trivia night with {3-6} rounds on {topic}, {country} and {history}.
Create a FAQ for a {place} with {3-8} questions.
Create a multiple-choice question about {history}, with four options.
Complete the sentence in {3-8} ways: "The trouble with {topic} is..."
Complete this list: {animal}, {animal}, {animal}, ...
Explain this headline to a {audience}: "{industry} firms in {country} turn to {tech}".
Explain the saying "better late than never" to someone from the time of {history}.
Predict three ways in which {topic} could change {city} by {2030-2090}.
Evaluate this idea: a {place} where you can rent a {animal}.
Evaluate the claim that {topic} causes {topic}.
Which skills from {hobby} are useful for a {job}?
What connects {figure}, {country} and {food}?
What if {figure} had lived in {country} today?
What if {history} had never happened?
What would a {place} on the Moon need?
What is a fair way to share {food} among {3-9} people?
What is the best advice you can give a {audience} about {topic}?
Which laws apply when a {job} in {country} damages a {object}? Keep it general.
Why do we have {topic}?
Why do {animal}s fascinate people?
Cuéntame algo sobre {country}.
Erkläre mir kurz {concept}.
Que penses-tu de {city} ?
I run a small {place} in {city} and want more visitors on {weekday}s. I have {200-3000} euros. Suggest a plan with \
costs.
I am a {job} with {2-20} years of experience and I want to move into {industry}. What should I learn first, and why?
My {relative} turns {20-80} in {month} and loves {hobby}, {food} and {topic}. Plan a {event} for {6-40} people in \
{city}.
We are {2-6} people with a car, {300-2500} euros and {3-14} days in {month}. We like {hobby} and {food}. Where should \
we go?
I have {food}, {food}, rice, two lemons and {20-60} minutes. What can I cook for {2-6} people? Give amounts and steps.
Two colleagues, {name1} and {name2}, disagree: {name1} wants to use {tool} and {name2} prefers {tool}. Help them decide.
My {app} is written in {language} and stores its data in {tool}. It gets slow with {1000-9999} users. Where would you \
look?
I wrote a program in {language} that {function}, but it fails on large inputs. Which mistakes are likely, and how do \
I test it?
Write a function in {language} that {function}. Then explain its running time and how you would test the edge cases.
Build a small {app} in {language}: first list the parts, then write the main one, then say how to run it.
Here is a table with the columns name, {object} and price. Write code in {language} that {function} for each row.
Write a story of about {150-600} words. A {being} {plot}. Tell it in the first person and let it end in a {place}.
Write a scene in which a {being} explains {concept} to a {being}. Both should learn something. Keep the tone {tone}.
Write a letter from {figure} to a {audience} of today about {topic}. Mention {tech}, and close with a piece of advice.
Write an essay of {3-6} paragraphs on the question whether {topic} matters more than {topic}. Take a clear position.
Write a speech for a {job} who retires after {20-45} years in {industry}. Mention {city}, a {object} and a {trait} \
colleague.
Write a {tone} opening chapter. The hero is a {being}, the place is {city}, and something is wrong with the {object}.
Write three versions of the same message, one {tone}, one {tone} and one {tone}: we have to cancel the {event} on \
{weekday}.
Act as a {job}. I am a {audience} who wants to {skill}. Ask me what you need to know, then give me a plan.
You are the narrator of a text adventure. I stand in a {place} with a {object} and a {trait} {animal}. Describe it, \
give me choices.
You are a {job} and a {audience} asks: "{problem}. What would you do?" Answer kindly and in detail.
Suppose {topic} were forbidden in {country} from {month} on. Who would gain, who would lose, and what would happen next?
Suppose you could ask {figure} and {figure} one question each about {concept}. What would they answer?
Explain {concept} three times: to a {audience}, to a {job}, and to a specialist in {field}.
Explain how {concept} and {concept} are connected, give an example from {industry}, and name one limit of the idea.
Describe an experiment that could show whether {topic} influences {topic}. Name the variables, the controls and the \
pitfalls.
Compare {country} and {country} in climate, food, history and everyday life. Then say which suits a {job} who likes \
{hobby}.
Compare the lives of {figure} and {figure}: childhood, work, failures and legacy. What could each have taught the other?
How did {history} and {history} differ in causes, course and results? Where do historians disagree?
Here are my notes: {fact} {fact} {fact} Turn them into a short report with a heading, then list what is still unclear.
Read the message and answer it politely: "{sentence} {opinion} {sentence}" Sign as {name} {surname}, {job}.
From this text, make a list of people with their jobs and ages where given: {fact} {fact} {fact} {fact} {fact} {fact}
Write a summary and a headline for this: {fact} {fact} {fact} {fact} {fact} {fact}
Which of these statements could be checked, and how? {fact} {fact} {opinion} {opinion} {fact}
Group these comments by subject and count them: {opinion} {opinion} {opinion} {opinion} {opinion}
Translate this note into {tongue}, then back into English, and tell me what got lost: {sentence} {sentence} {sentence}
{name1} earns {1500-4000} euros, pays {400-1200} for rent and saves {5-20} percent. How much does {name1} have for \
the rest?
A {place} has {3-9} rooms with {4-30} seats each; on {weekday} {10-90} percent are taken. How many seats are free?
{name1} and {name2} start at the same time from {city} and {city}, {100-900} km apart, at {40-120} and {50-130} km/h. \
When do they meet?
A tank holds {100-900} litres. One pipe fills it in {2-6} hours, another in {3-9}. How long do both take together?
""")
